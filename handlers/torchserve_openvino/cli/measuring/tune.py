"""`torchserve-openvino tune NET.mar`."""

import json
import tempfile
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from torchserve_openvino.cli.console import ending_on_signals, fail, print_json, stdout, steps


def tune(
    archive: Annotated[Path, typer.Argument(metavar="NET.mar", help="The archive.", show_default=False)],
    requests: Annotated[
        Path | None,
        typer.Option(help="Folder with a request body in each file; by default the archive's warm-up samples."),
    ] = None,
    p99: Annotated[str | None, typer.Option(help="Limit of the 99th percentile, such as 50ms.")] = None,
    ttft: Annotated[str | None, typer.Option(help="Limit for the first bytes of streamed answers.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests/s that have to be served.")] = None,
    memory: Annotated[str | None, typer.Option(help="Most memory of the server, such as 2GB.")] = None,
    cores: Annotated[int | None, typer.Option(help="Cores to use; by default all of this process.")] = None,
    goal: Annotated[str | None, typer.Option(help="throughput, latency or cost.", show_default="throughput")] = None,
    minutes: Annotated[float | None, typer.Option(help="About how long.", show_default="10")] = None,
    settings_file: Annotated[
        Path | None, typer.Option("--settings", help="The same in a YAML file, and which values to try.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results.", show_default="NET-tuned beside the archive")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find the model-config.yaml that serves an archive best on this machine.

    Candidates are proven against eager PyTorch on your requests, then measured on real servers in turns with the
    present configuration. "Nothing better was found" is a valid result. An interrupted run goes on when it is started
    again; Ctrl-C writes what is known.

    Examples:

        torchserve-openvino tune net.mar --requests photos --p99 50ms

        torchserve-openvino tune net.mar --rate 40 --goal latency --minutes 5
    """
    try:
        import aiohttp  # noqa: F401
        import jinja2  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        fail(f"{error}; the tuner needs: pip install 'torchserve-openvino[tune]'")
    from torchserve_openvino.bench.bodies import read_folder
    from torchserve_openvino.errors import TorchServeOpenVINOError
    from torchserve_openvino.tune.archives import Variants
    from torchserve_openvino.tune.session import Session, requests_for
    from torchserve_openvino.tune.settings import read_settings

    options = {
        "p99": p99, "ttft": ttft, "rate": rate, "memory": memory, "cores": cores, "goal": goal, "minutes": minutes,
    }  # fmt: skip
    target = out or archive.with_name(f"{archive.stem}-tuned")
    result = None
    try:
        settings = read_settings(settings_file, options)
        folder_bodies = read_folder(requests) if requests is not None else None
        with ending_on_signals(), tempfile.TemporaryDirectory(prefix="torchserve-openvino-tune-") as scratch:
            variants = Variants(archive, Path(scratch))
            bodies, warnings = requests_for(folder_bodies, variants)
            with steps(lambda text: typer.echo(text, err=True)) as tell:
                session = Session(archive, bodies, settings, target / "trials.json", tell)
                typer.echo(session.plan(variants), err=True)
                for warning in warnings:
                    typer.secho(f"warning: {warning}", fg=typer.colors.YELLOW, err=True)
                result = session.run(variants, Path(scratch))
            facts = _write(result, variants, settings, warnings, session.cores, archive, target)
    except TorchServeOpenVINOError as error:
        fail(str(error))
    except KeyboardInterrupt:
        if result is not None:
            fail(f"interrupted while the result was written to {target}: run it again, which measures nothing anew.")
        fail("interrupted before any server was measured: nothing is known yet, and nothing was written.")
    if as_json:
        print_json(facts)
    else:
        _show(facts, target)
    raise typer.Exit(0 if facts["choice"] else 1)


def _write(
    result: Any, variants: Any, settings: Any, warnings: list[str], cores: int, archive: Path, target: Path
) -> dict[str, Any]:
    from torchserve_openvino.files.atomic import write_atomically
    from torchserve_openvino.tune.candidates import changes
    from torchserve_openvino.tune.page import as_json, to_html
    from torchserve_openvino.tune.writing import changed_yaml

    best = result.choice.best
    changed = changes(best.candidate, result.present, variants.config) if best is not None else {}
    comment = f"tuned {date.today().isoformat()}: {result.choice.reason}"
    facts = as_json(result, variants.name, settings, changed, warnings, cores)
    facts["archive"] = str(archive.resolve())
    comments = dict.fromkeys(changed, comment)
    for option in best.candidate.engine.options if best is not None else ():
        comments |= {path: f"{comment}; {option.why}" for path in option.changes if option.why}
    text = changed_yaml(variants.text, "model-config.yaml", changed, comments)
    target.mkdir(parents=True, exist_ok=True)
    # What `package --tuned` reads comes last: it belongs to what is beside it.
    results = {
        "model-config.yaml": text, "tune.html": to_html(facts), "tune.json": json.dumps(facts, indent=1, default=str),
    }  # fmt: skip
    (target / "tune.json").unlink(missing_ok=True)
    for name, content in results.items():
        write_atomically(target / name, content.encode(), mode=0o644)
    return facts


def _show(facts: dict[str, Any], target: Path) -> None:
    from rich.table import Table

    console = stdout()
    table = Table("configuration", "score", "to the best", "p99, ms", "memory, MB", "result")
    for candidate in facts["candidates"]:
        ratio = candidate["ratio"]
        table.add_row(
            candidate["candidate"],
            f"{candidate['score']:.1f}" if candidate["score"] else "",
            f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "",
            f"{candidate['p99_ms']:.0f}" if candidate["p99_ms"] else "",
            f"{candidate['memory'] / 1e6:.0f}",
            candidate["left"] or ("chosen" if candidate["candidate"] == facts["choice"] else ""),
        )
    console.print(table)
    console.print(f"{facts['reason'][:1].upper()}{facts['reason'][1:]}.")
    for length in facts["sizes"].get("lengths", ()):
        console.print(
            f"{length['key']}: {length['summary']}; {length['padding']:.0%} of what is computed at present is padding."
        )
    for text in filter(None, (facts["confirmation"], facts["claim"])):
        console.print(text)
    console.print(f"{target / 'model-config.yaml'} has the choice, {target / 'tune.html'} the evidence.")
    if facts["choice"]:
        console.print(f"torchserve-openvino package --tuned {target} puts it into the archive.")
