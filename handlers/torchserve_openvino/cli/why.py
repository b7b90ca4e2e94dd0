"""`torchserve-openvino why NAME` and `torchserve-openvino ready NAME`."""

import contextlib
import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from torchserve_openvino.cli.console import fail, print_json, stdout, steps
from torchserve_openvino.cli.reports.tables import DEFAULT_MANAGEMENT, Logs, Management, Name, Token

if TYPE_CHECKING:
    from rich.console import Console

    from torchserve_openvino.cli.reports.worker_log import Cause, LogState

_SECONDS_BETWEEN = 0.5
# A server that starts answers much earlier, and knows the models that it starts with.
_SECONDS_FOR_A_SERVER = 60.0


def why(
    model: Name,
    logs: Logs = None,
    management: Management = DEFAULT_MANAGEMENT,
    token: Token = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the server.", min=0.1)] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain why a model is not served: query the server and read its logs.

    A model that is still loading is shown with its current step.

    Exit code 0 if all its workers are READY, 1 otherwise. The logs are read
    even if the server is down.

    Examples:

        torchserve-openvino why net

        torchserve-openvino why net/1.0 --logs /var/log/torchserve --json
    """
    from torchserve_openvino.cli.reports.source import ReportNotFoundError, answering, fetch, workers_of
    from torchserve_openvino.cli.reports.worker_log import LogState, deaths_in

    state: dict[str, Any] = {"model": model, "workers": {}, "server": "", "cause": None, "loading": None, "died": []}
    management = answering(management)
    try:
        state["workers"] = workers_of(model, management=management, token=token, timeout=timeout)
    except ReportNotFoundError as error:
        state["server"] = str(error)
    served = bool(state["workers"]) and set(state["workers"].values()) == {"READY"}
    folder = logs or log_folder()
    log = LogState() if served else _read(folder, model)
    state["cause"] = vars(log.cause) if log.cause is not None else None
    state["loading"] = vars(log.loading) if log.loading is not None else None
    # A worker that is busy, or of another handler, gives no report.
    with contextlib.suppress(ReportNotFoundError):
        if served:
            state["died"] = deaths_in(fetch(model, management=management, token=token, timeout=timeout).report)
    if as_json:
        print_json({"served": served, **state})
        raise typer.Exit(0 if served else 1)
    console = stdout()
    for worker, status in state["workers"].items():
        console.print(f"worker {worker}: {shown_status(status)}")
    if served:
        console.print(f"{model} is served; `torchserve-openvino report {model}` shows what runs where.")
        for text in state["died"]:
            console.print(text)
        return
    if state["server"]:
        console.print(state["server"])
    if log.loading is not None:
        console.print(f"{model} {log.loading.text}")
        console.print(f"logged at {log.loading.time} in {log.loading.file}")
    elif log.cause is None and " has no model " not in state["server"]:
        _without_a_cause(model, state["workers"], folder)
    if log.cause is not None:
        _print_cause(console, log.cause, "an earlier start failed: " if log.loading is not None else "cause: ")
    raise typer.Exit(1)


def ready(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="A model's name, or NAME/VERSION; all models without it.", show_default=False
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="Address for inference: of TorchServe, serve, Ray Serve or KServe.")] = (
        "http://127.0.0.1:8080"
    ),
    logs: Logs = None,
    management: Annotated[str, typer.Option(help="Address of TorchServe's management API.")] = DEFAULT_MANAGEMENT,
    token: Token = None,
    inference_token: Annotated[
        str | None,
        typer.Option(envvar="TORCHSERVE_INFERENCE_TOKEN", help="Inference key, if TorchServe requires one."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until the model is ready.", min=0.1)] = 600.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, for probes.")] = False,
    patience: Annotated[float, typer.Option(help="Seconds to wait for each answer.", min=0.1)] = 10.0,
) -> None:
    """Wait until a model is ready, and show what its workers do until then.

    Exit code 0 only if a worker answers the model's own warm-up sample
    rightly, and its fallback policy holds. Otherwise 1, with one line of cause:
    as soon as a worker refuses the model, or after the timeout. The server may
    still be starting: it has a minute to answer, and to know the model.

    Examples:

        torchserve-openvino ready net

        torchserve-openvino ready --once --url http://127.0.0.1:9000
    """
    from torchserve_openvino.cli.reports.readiness import OTHER_HANDLER, ServerAddress, not_ready
    from torchserve_openvino.cli.reports.worker_log import NOW, LogState, read_logs

    server = ServerAddress(url.rstrip("/"), management.rstrip("/"), token, inference_token)
    folder, began, start = logs or log_folder(), datetime.now().strftime(NOW), time.monotonic()
    shown, known = "", start
    with steps(typer.echo) as show:
        while problem := not_ready(server, model, min(patience, max(1.0, start + timeout - time.monotonic()))):
            if once:
                fail(f"not ready: {problem}")
            if not _is_unknown(problem):
                known = time.monotonic()
            try:
                log = read_logs(folder, model)
            except OSError:
                # They only explain the wait.
                log = LogState()
            step = f"{model} {log.loading.text}" if model is not None and log.loading is not None else problem
            if step != shown:
                shown = step
                show(step)
            late = time.monotonic() - start > timeout or time.monotonic() - known > _SECONDS_FOR_A_SERVER
            refused = log.cause is not None and log.cause.time >= began and log.cause.refused
            # No wait changes that.
            refused = refused or OTHER_HANDLER in problem
            if refused or late:
                if log.cause is not None and (model is not None or refused):
                    _print_cause(stdout(), log.cause, "cause: ")
                after = "" if refused else f" after {time.monotonic() - start:.0f} s"
                fail(f"not ready{after}: {problem}")
            time.sleep(_SECONDS_BETWEEN)
    typer.echo(f"{model or 'all models'}: ready")


def _read(folder: Path, model: str) -> "LogState":
    from torchserve_openvino.cli.reports.worker_log import read_logs

    try:
        return read_logs(folder, model)
    except OSError as error:
        fail(f"{error.filename or folder} cannot be read: {error.strerror or error}.")


def _is_unknown(problem: str) -> bool:
    """Returns True if no server answers, or it does not know the model: one that starts does soon."""
    return problem.startswith("no server answers") or ": 404: " in problem or "serves no model" in problem


def _without_a_cause(model: str, workers: Mapping[str, str], folder: Path) -> NoReturn:
    if workers and (folder / "model_log.log").is_file():
        fail(
            f"a worker of {model} is not READY, and {folder} contains no word from it yet: Python starts, or the "
            "handler is not one of this package (--logs names another log folder)."
        )
    from torchserve_openvino.cli.reports.worker_log import failed_load

    if not folder.is_dir():
        fail(f"there is no folder {folder}: name TorchServe's log folder (--logs), or look into the log of `serve`.")
    if line := failed_load(folder):
        fail(f"{folder} contains no cause for {model}. TorchServe logged: {line}")
    fail(
        f"{folder} contains no cause for {model}. Is it TorchServe's log folder (--logs)? What ends TorchServe itself, "
        "such as a port in use, is in its output."
    )


def _print_cause(console: "Console", cause: "Cause", title: str) -> None:
    again = f", {cause.times} times" if cause.times > 1 else ""
    console.print(f"{title}{cause.text}")
    if cause.fix:
        console.print(f"fix: {cause.fix}")
    console.print(f"logged at {cause.time}{again} in {cause.file}")


def log_folder() -> Path:
    """Returns TorchServe's log folder: LOG_LOCATION, else ``logs``."""
    return Path(os.environ.get("LOG_LOCATION", "logs"))


def shown_status(status: str) -> str:
    """Returns a worker's status for the user: TorchServe calls every worker that is not READY ``UNLOADING``."""
    return "not READY: it loads, or has ended" if status == "UNLOADING" else status
