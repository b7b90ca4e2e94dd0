"""Injects deliberate faults into this package one by one and reports which the fuzzer finds; exit 1 if it misses any.

python scripts/fuzz_mutants.py --models 300
python scripts/fuzz_mutants.py --only closed_rows,weights_unwatched --seed 5
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from fuzzing import modes
from fuzzing.campaign import Campaign
from fuzzing.mutants import MUTANTS

console = Console(stderr=True)


def main(
    seed: Annotated[int, typer.Option(help="Of the models.")] = 1,
    models: Annotated[int, typer.Option(help="At most, for one fault.")] = 300,
    jobs: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    only: Annotated[str, typer.Option(help=f"Faults by comma: {', '.join(MUTANTS)}.")] = "",
    limit: Annotated[float, typer.Option(help="Seconds for one model.")] = 120.0,
) -> None:
    """Looks for deliberate faults.

    Examples: fuzz_mutants.py --models 300; fuzz_mutants.py --only closed_rows --seed 5
    """
    chosen = [name for name in only.split(",") if name] or list(MUTANTS)
    if unknown := [name for name in chosen if name not in MUTANTS]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(MUTANTS)}", param_hint="--only")
    table = Table("fault", "found", "after models", "first seen as")
    missed = []
    for name in chosen:
        campaign = Campaign(
            seed=seed, filters=modes.parse(MUTANTS[name].mode), jobs=jobs, limit=limit, mutant=name,
            stop_at_first=True, console=Console(quiet=True),
        )  # fmt: skip
        campaign.run(range(models))
        missed += [] if campaign.failures else [name]
        first = campaign.failures[0] if campaign.failures else None
        seen = f"{first.name} {first.kind}: {first.detail[:80]}" if first else ""
        table.add_row(name, "yes" if first else "NO", str(sum(campaign.counts.values())), seen)
        console.print(f"{name} ({MUTANTS[name].says}): {seen or 'not found'}", markup=False, highlight=False)
    console.print(table)
    raise typer.Exit(1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
