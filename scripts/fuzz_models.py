"""Runs random models through this package; exit 1 if values, types, shapes, aliasing or effects differ from eager.

Each model has 3 to 25 operators, its own inputs, buffers, return structure, compile mode and sequence of calls, all
drawn from the seed. A failure is shrunk to a few lines and written as a script. The mode ``real_sizes`` draws blocks of
published models at the sizes that users have instead: heads of 32 to 256, vocabularies of 100,000, a million elements.

    python scripts/fuzz_models.py --seed 1 --models 300
    python scripts/fuzz_models.py --seed 7 --models 2000 --mode export,dynamic --out found
    python scripts/fuzz_models.py --seed 7 --models 2000 --mode real_sizes
    python scripts/fuzz_models.py --seed 7 --first 1234 --models 1
    python scripts/fuzz_models.py --replay tests/fuzz_cases
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from fuzzing import modes
from fuzzing.campaign import Campaign, Failure
from fuzzing.judge import KINDS

console = Console(stderr=True)
_IGNORABLE = (*KINDS, "timeout")


def main(
    seed: Annotated[int, typer.Option(help="Model i of a seed is the same everywhere.")] = 1,
    models: Annotated[int, typer.Option(help="How many.")] = 300,
    first: Annotated[int, typer.Option(help="Number of the first model.")] = 0,
    jobs: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    seconds: Annotated[float, typer.Option(help="Start no further model after this time; 0 is no limit.")] = 0.0,
    limit: Annotated[float, typer.Option(help="Seconds for one model; what takes longer is a failure.")] = 120.0,
    mode: Annotated[str, typer.Option(help=f"Run all so: any of {', '.join(modes.NAMES)}, by comma.")] = "",
    shrink: Annotated[bool, typer.Option(help="Make failing models small.")] = True,
    shrink_seconds: Annotated[float, typer.Option(help="For one failure.")] = 60.0,
    strict: Annotated[bool, typer.Option("--strict", help="Strides count where memory has gaps too.")] = False,
    ignore: Annotated[str, typer.Option(help="Kinds of failures not to look at: stride,alias for example.")] = "",
    replay: Annotated[Path | None, typer.Option(help="A stored case, or a folder of them, instead of a seed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the scripts and cases found.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Compares random models with eager PyTorch.

    Examples: fuzz_models.py --seed 1 --models 300; fuzz_models.py --seed 3 --mode openvino_ts,dynamic --no-shrink;
    fuzz_models.py --replay tests/fuzz_cases
    """
    try:
        filters = modes.parse(mode)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--mode") from None
    ignored = frozenset(filter(None, ignore.split(",")))
    if unknown := sorted(ignored.difference(_IGNORABLE)):
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(_IGNORABLE)}", param_hint="--ignore")
    campaign = Campaign(
        seed=seed, filters=filters, jobs=jobs, limit=limit, shrink_seconds=shrink_seconds if shrink else 0.0,
        strict=strict, ignored=ignored, out=out, console=console, seconds=seconds,
    )  # fmt: skip
    if replay is not None:
        paths = sorted(replay.glob("*.json")) if replay.is_dir() else [replay]
        if not paths:
            raise typer.BadParameter(f"no case (*.json) in {replay}", param_hint="--replay")
        campaign.replay(paths)
    else:
        campaign.run(range(first, first + models))
    _print(campaign)
    if as_json:
        typer.echo(json.dumps(campaign.to_dict()))
    # A broken task says nothing about its model: a fault of the fuzzer.
    raise typer.Exit(1 if campaign.failures or campaign.counts["broken"] else 0)


def _print(campaign: Campaign) -> None:
    for failure in campaign.distinct():
        _print_failure(failure, campaign)
    table = Table("outcome", "models")
    for name, count in sorted(campaign.counts.items()):
        table.add_row(name, str(count))
    console.print(table)
    cpu = campaign.cpu_seconds / max(1, sum(campaign.counts.values()))
    console.print(
        f"{campaign.models_per_second:.2f} models/s, {cpu:.2f} CPU seconds for one, "
        f"{campaign.coverage:.1%} of their operators on OpenVINO, "
        f"{len(campaign.failures)} failures, {len(campaign.distinct())} distinct"
    )


def _print_failure(failure: Failure, campaign: Campaign) -> None:
    alike = sum(f.signature == failure.signature for f in campaign.failures)
    console.rule(f"{failure.kind}: {failure.name} ({alike} alike)")
    console.print(failure.script, markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
