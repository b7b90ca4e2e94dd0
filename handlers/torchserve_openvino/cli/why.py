"""`torchserve-openvino why NAME`."""

import contextlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from torchserve_openvino.cli.console import fail, print_json, stdout
from torchserve_openvino.cli.report import DEFAULT_MANAGEMENT


def why(
    model: Annotated[str, typer.Argument(metavar="NAME", help="A model's name, or NAME/VERSION.", show_default=False)],
    logs: Annotated[
        Path | None,
        typer.Option(help="TorchServe's log folder; by default LOG_LOCATION, else ./logs.", show_default=False),
    ] = None,
    management: Annotated[str, typer.Option(help="Address of TorchServe's management API.")] = DEFAULT_MANAGEMENT,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="TORCHSERVE_MANAGEMENT_TOKEN", help="Management key, if the server requires one.", show_default=False
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the server.", min=0.1)] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain why a model is not served: query the server and read its logs.

    Exit code 0 if all its workers are READY, 1 otherwise. The logs are read
    even if the server is down.

    Examples:

        torchserve-openvino why net

        torchserve-openvino why net/1.0 --logs /var/log/torchserve --json
    """
    from torchserve_openvino.cli.reports.source import ReportNotFoundError, fetch, workers_of
    from torchserve_openvino.cli.reports.worker_log import deaths_in, find_cause

    state: dict[str, Any] = {"model": model, "workers": {}, "server": "", "cause": None, "died": []}
    try:
        state["workers"] = workers_of(model, management=management, token=token, timeout=timeout)
    except ReportNotFoundError as error:
        state["server"] = str(error)
    served = bool(state["workers"]) and set(state["workers"].values()) == {"READY"}
    folder = logs or Path(os.environ.get("LOG_LOCATION", "logs"))
    cause = None if served else find_cause(folder, model)
    if cause is not None:
        state["cause"] = vars(cause)
    # A worker that is busy, or of another handler, gives no report.
    with contextlib.suppress(ReportNotFoundError):
        if served:
            state["died"] = deaths_in(fetch(model, management=management, token=token, timeout=timeout).report)
    if as_json:
        print_json({"served": served, **state})
        raise typer.Exit(0 if served else 1)
    console = stdout()
    for worker, status in state["workers"].items():
        console.print(f"worker {worker}: {status}")
    if served:
        console.print(f"{model} is served; `torchserve-openvino report {model}` shows what runs where.")
        for text in state["died"]:
            console.print(text)
        return
    if state["server"]:
        console.print(state["server"])
    if cause is None:
        fail(f"{folder} contains no cause for {model}. Is it TorchServe's log folder (--logs)?")
    again = f", {cause.times} times" if cause.times > 1 else ""
    console.print(f"cause: {cause.text}")
    if cause.fix:
        console.print(f"fix: {cause.fix}")
    console.print(f"logged at {cause.time}{again} in {cause.file}")
    raise typer.Exit(1)
