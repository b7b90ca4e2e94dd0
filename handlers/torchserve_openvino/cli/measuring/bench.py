"""`torchserve-openvino bench URL_OR_MAR`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from torchserve_openvino.cli.console import ending_on_signals, fail, print_json, stdout, steps


def bench(
    target: Annotated[
        str, typer.Argument(metavar="URL_OR_MAR", help="Where to send requests, or an archive.", show_default=False)
    ],
    requests: Annotated[
        Path | None,
        typer.Option(help="Folder with a request body in each file; by default an archive's warm-up samples."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Another URL, archive, or YAML for the first archive; measured in turns.", show_default=False
        ),
    ] = None,
    p99: Annotated[str | None, typer.Option(help="Limit of the 99th percentile, such as 50ms.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Send so many requests/s instead of looking for the highest rate.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each is measured, in random order.", min=2)] = 3,
    seconds: Annotated[float, typer.Option(help="Of each window.", min=0.5)] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all windows as JSON.")] = False,
) -> None:
    """Measure a server under Poisson load: the highest rate within a limit, or latencies at a rate.

    Latencies count from the time at which a request was due, so that a slow server hides nothing. With --against both
    are measured in turns, and the ratio has an interval: two equal servers are not told apart.

    Exit code 1 if a request failed or no rate holds.

    Examples:

        torchserve-openvino bench http://127.0.0.1:8080/predictions/net --requests photos --rate 20

        torchserve-openvino bench net.mar --against other.mar --p99 100ms
    """
    from torchserve_openvino.errors import TorchServeOpenVINOError

    try:
        from torchserve_openvino.bench.bodies import read_folder
        from torchserve_openvino.tune.comparison import Comparison
        from torchserve_openvino.tune.settings import read_settings
    except ImportError as error:
        fail(f"{error}; this command needs: pip install 'torchserve-openvino[tune]'")
    try:
        settings = read_settings(None, {"p99": p99, "rate": rate, "window": seconds})
        bodies = read_folder(requests) if requests is not None else None
        with ending_on_signals(), steps(lambda text: typer.echo(text, err=True)) as tell:
            comparison = Comparison([target, *([against] if against else [])], bodies, settings, rounds, tell)
            facts = comparison.run()
    except TorchServeOpenVINOError as error:
        fail(str(error))
    if as_json:
        print_json(facts)
    else:
        _show(facts)
    raise typer.Exit(0 if all(target["rate"] and not target["failures"] for target in facts["targets"]) else 1)


def _show(facts: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("target", "requests/s", "p50, ms", "p99, ms", "requests", "failures", "disturbed windows")
    for target in facts["targets"]:
        shown = [f"{target[name]:.1f}" if target[name] is not None else "" for name in ("rate", "p50", "p99")]
        table.add_row(target["target"], *shown, *(str(target[name]) for name in ("requests", "failures", "disturbed")))
    console = stdout()
    console.print(table)
    for target in facts["targets"]:
        if target["claim"]:
            console.print(f"{target['target']}: {target['claim']}")
    if facts["verdict"]:
        console.print(facts["verdict"])
