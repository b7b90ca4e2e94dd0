"""`torchserve-openvino selftest`."""

import functools
import platform
from typing import Annotated

import typer
from rich.table import Table

from torchserve_openvino.cli.console import print_json, stdout, steps


def selftest(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Try what this package relies on in the installed torch, OpenVINO, TorchServe and transformers.

    A worker does the same by itself, once, where a version is not a tested
    one: it then serves with a warning, or refuses and says what changed.
    Paste the tables into an issue. Exit code 0 if all holds, 1 otherwise.

    Examples:

        torchserve-openvino selftest

        torchserve-openvino selftest --json
    """
    from torchserve_openvino.report.compile_report import environment
    from torchserve_openvino.serving.versions.probes import PROBES, run_probes
    from torchserve_openvino.serving.versions.tested import TESTED, installed, untested

    versions, news = installed(), untested()
    outcomes = []
    with steps(functools.partial(typer.echo, err=True)) as say:
        for outcome in run_probes():
            outcomes.append(outcome)
            say(f"{len(outcomes)} of {len(PROBES)}: {outcome.about}")
    holds = not any(outcome.error for outcome in outcomes)
    if as_json:
        rows = {name: {"version": version, "tested": name not in news} for name, version in versions.items()}
        print_json({"ok": holds, "versions": rows, "probes": [outcome._asdict() for outcome in outcomes]})
        raise typer.Exit(0 if holds else 1)
    console = stdout()
    table = Table("package", "version", "tested with", title="versions", title_justify="left")
    for name, version in versions.items():
        known = ", ".join(TESTED[name])
        table.add_row(name, version, known if name not in news else f"{known}: not with this one")
    table.add_row("python", platform.python_version(), "")
    table.add_row("cpu", str(environment()["cpu"]), "")
    console.print(table)
    table = Table("what is relied on", "holds", "seconds", title="probes", title_justify="left")
    for outcome in outcomes:
        table.add_row(outcome.about, outcome.error or "yes", f"{outcome.seconds:.1f}")
    console.print(table)
    raise typer.Exit(0 if holds else 1)
