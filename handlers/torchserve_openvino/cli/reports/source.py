"""Gets a compile report from TorchServe's management API or from a file."""

import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import httpx

from torchserve_openvino.cache.open import state_folder
from torchserve_openvino.cli.reports.tables import DEFAULT_MANAGEMENT, DEFAULT_URL
from torchserve_openvino.config.spelling import nearest
from torchserve_openvino.files.json_text import parse_json, read_json
from torchserve_openvino.report.saved import Saved, last_saved

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
# TorchServe's frontend knows its workers, and answers at once.
_SECONDS_FOR_A_LIST = 5.0
# A worker's report comes in a fraction of this, unless the worker is in the middle of a batch.
_SECONDS_FOR_A_BUSY_WORKER = 0.5


class ReportNotFoundError(Exception):
    """There is no report to show; the message says why and what to do."""


class OtherHandlerError(ReportNotFoundError):
    """The model is served, by a handler that has no report."""


class FetchedReport(NamedTuple):
    """A report and a heading for it.

    Attributes:
        report: As the worker returned it, or saved it.
        title: The heading.
        note: Why it is a saved one, and what to do; empty for a worker's current report.
        served: Whether the model is served.
    """

    report: dict[str, Any]
    title: str
    note: str = ""
    served: bool = True


def fetch(model: str, *, management: str, token: str | None, timeout: float) -> FetchedReport:
    """Gets a report.

    Args:
        model: Name, URL or path of a JSON file.
        management: Address of the management API, for a name.
        token: Management key, if the server requires one.
        timeout: Seconds to wait for the server, which queries a worker that may be busy with a batch.

    Raises:
        ReportNotFoundError: The server is down, the model is unknown or has another handler, or there is no report.
    """
    if "://" in model:
        return _from_server(model, token, timeout)
    if model.endswith(".json") or Path(model).expanduser().is_file():
        return _from_file(Path(model).expanduser())
    return _from_server(f"{management.rstrip('/')}/models/{quote(model)}", token, timeout)


def _from_file(path: Path) -> FetchedReport:
    try:
        answer = read_json(path, allow_nan=True)
    except OSError as error:
        raise ReportNotFoundError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ReportNotFoundError(f"{path} is not a JSON file: {error}.") from error
    report = find_report(answer)
    if report is None:
        raise ReportNotFoundError(f"{path} contains no compile report.")
    return FetchedReport(report, str(path))


def _from_server(url: str, token: str | None, timeout: float) -> FetchedReport:
    name = _name_in(url)
    response = _get(url, token, timeout)
    if response.status_code != httpx.codes.OK:
        raise ReportNotFoundError(_why(response, name, token, timeout))
    answer = _json(response, url)
    report = find_report(answer)
    if report is None:
        raise _no_report(answer, name)
    version = next((entry["modelVersion"] for entry in _entries(answer) if "modelVersion" in entry), None)
    return FetchedReport(report, f"{name} {version}" if version and "/" not in name else name)


def fetch_or_saved(model: str, *, management: str, token: str | None, timeout: float) -> FetchedReport:
    """Gets a report without waiting for a worker that is busy, loads or has ended: its last one is in a file then.

    Args:
        model: Name, URL or path of a JSON file.
        management: Address of the management API, for a name.
        token: Management key, if the server requires one.
        timeout: Seconds to wait for a worker of which no report is saved here.

    Raises:
        ReportNotFoundError: As `fetch`, and no report is saved.
    """
    if "://" not in model and (model.endswith(".json") or Path(model).expanduser().is_file()):
        return _from_file(Path(model).expanduser())
    url = model if "://" in model else f"{management.rstrip('/')}/models/{quote(model)}"
    name = _name_in(url)
    why = f"`torchserve-openvino why {name}` says more."
    try:
        workers = workers_in(_entries_at(url, name, token, min(timeout, _SECONDS_FOR_A_LIST)))
    except ReportNotFoundError as error:
        saved = _saved(url)
        if saved is None:
            raise
        return _as_fetched(name, saved, f"{error} {why}", served=False)
    pids = {int(worker["pid"]) for worker in workers if str(worker.get("pid")).isdecimal()}
    # Ray Serve's replicas do not say their states.
    states = {worker["status"] for worker in workers if "status" in worker}
    if states and "READY" not in states:
        saved = _saved(url)
        if saved is None:
            raise ReportNotFoundError(f"no worker of {name!r} is READY, and no report of it is saved; {why}")
        return _as_fetched(name, saved, f"No worker of {name} is READY; {why}", served=False)
    # Without workers, the model was refused so often that TorchServe gave up: the last of them counts.
    saved = _saved(url, pids if workers else None)
    try:
        return _from_server(url, token, timeout if saved is None else min(timeout, _SECONDS_FOR_A_BUSY_WORKER))
    except ReportNotFoundError as error:
        if saved is None:
            raise ReportNotFoundError(f"{error} {why}") from error
        served = bool(workers)
        return _as_fetched(name, saved, f"No current report: {error}{'' if served else f' {why}'}", served=served)


def _saved(url: str, pids: set[int] | None = None) -> Saved | None:
    """Returns the last report that a worker on this machine saved; None for a server on another one."""
    if urlsplit(url).hostname not in _LOOPBACK:
        return None
    state = state_folder(None)
    model, _, version = _name_in(url).partition("/")
    return last_saved(state, unquote(model), version, pids) if state is not None else None


def _as_fetched(name: str, saved: Saved, note: str, *, served: bool) -> FetchedReport:
    date = datetime.fromtimestamp(saved.time).strftime("%Y-%m-%d %H:%M:%S")
    end = f" This worker refused the model: {saved.cause}" if saved.cause else ""
    note = f"{note}\nBelow is what worker process {saved.pid} saved at {date}.{end}"
    version = f" {saved.version}" if saved.version and "/" not in name else ""
    return FetchedReport(
        {**saved.report, "saved": {"time": date, "cause": saved.cause}}, f"{name}{version}", note, served
    )


def _name_in(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ReportNotFoundError(f"{url!r} is not the URL of a model, such as http://127.0.0.1:8081/models/NAME.")
    if "/models/" not in parts.path or parts.path.endswith("/models/"):
        base = f"{parts.scheme}://{parts.netloc}"
        raise ReportNotFoundError(f"{url!r} does not name a model; write {base}/models/NAME.")
    return parts.path.partition("/models/")[2].strip("/")


def answering(management: str) -> str:
    """Returns the address of the management API: where none is named, and TorchServe's does not answer, `serve`'s."""
    if management != DEFAULT_MANAGEMENT:
        return management
    for address in (DEFAULT_MANAGEMENT, DEFAULT_URL):
        parts = urlsplit(address)
        try:
            socket.create_connection((str(parts.hostname), int(parts.port or 80)), 1.0).close()
        except OSError:
            continue
        return address
    return management


def workers_of(model: str, *, management: str, token: str | None, timeout: float) -> dict[str, str]:
    """Returns the status of each worker of a model by the worker's id.

    Raises:
        ReportNotFoundError: The server is down, or the model is not registered.
    """
    workers = workers_in(entries_of(model, management=management, token=token, timeout=timeout))
    return {str(worker.get("id")): str(worker.get("status")) for worker in workers}


def entries_of(model: str, *, management: str, token: str | None, timeout: float) -> Sequence[Mapping[str, Any]]:
    """Returns what the management API says of each version of a model, without its report.

    Raises:
        ReportNotFoundError: The server is down, or the model is not registered.
    """
    return _entries_at(f"{management.rstrip('/')}/models/{quote(model)}", model, token, timeout)


def workers_in(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the workers of all versions."""
    return [worker for entry in entries for worker in _entries(entry.get("workers") or [])]


def _entries_at(url: str, name: str, token: str | None, timeout: float) -> Sequence[Mapping[str, Any]]:
    # Not customized: the handler's own part needs a READY worker.
    response = _get(url, token, timeout, customized=False)
    if response.status_code != httpx.codes.OK:
        raise ReportNotFoundError(_why(response, name, token, timeout))
    return _entries(_json(response, url))


def _json(response: httpx.Response, url: str) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise ReportNotFoundError(f"{url} did not answer in JSON. Is it the management API of TorchServe?") from error


def _get(url: str, token: str | None, timeout: float, *, customized: bool = True) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    parts = urlsplit(url)
    try:
        # A proxy set in the environment can't reach this machine's loopback.
        with httpx.Client(trust_env=parts.hostname not in _LOOPBACK, timeout=timeout) as client:
            return client.get(url, params={"customized": "true"} if customized else {}, headers=headers)
    except httpx.ConnectError as error:
        message = (
            f"no server answers at {parts.scheme}://{parts.netloc}. Is TorchServe running, and is this its "
            "management_address (config.properties)? Name another address, such as that of `serve`, with --url."
        )
        raise ReportNotFoundError(message) from error
    except httpx.TimeoutException as error:
        message = f"{parts.netloc} did not answer within {timeout:g} s (--timeout); a worker may be loading."
        raise ReportNotFoundError(message) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ReportNotFoundError(f"{url}: {error}") from error


def _why(response: httpx.Response, name: str, token: str | None, timeout: float) -> str:
    try:
        body = response.json()
        message = str(body.get("message", body)) if isinstance(body, dict) else str(body)
    except ValueError:
        message = response.text.strip()[:200]
    host = f"{response.url.scheme}://{response.url.netloc.decode()}"
    if response.status_code == httpx.codes.NOT_FOUND:
        names = _served(host, token, timeout)
        near = nearest(name.split("/", maxsplit=1)[0], names)
        hint = f" Did you mean {near!r}?" if near and near != name.split("/", maxsplit=1)[0] else ""
        return f"{host} has no model {name!r}: {message.removesuffix('.')}.{hint}"
    if response.status_code in {400, 401, 403} and "token" in message.lower():
        return f"{host} requires a token: {message} Give its management key with --token."
    return f"{host} answered {response.status_code}: {message}"


def _served(host: str, token: str | None, timeout: float) -> list[str]:
    """Returns the names of the registered models, for a hint; empty if the server does not list them."""
    try:
        response = _get(f"{host}/models", token, min(timeout, 5.0))
        models = response.json()["models"]
        return [str(entry["modelName"]) for entry in models]
    except (ReportNotFoundError, ValueError, KeyError, TypeError):
        return []


def _entries(answer: Any) -> Sequence[Mapping[str, Any]]:
    entries = answer if isinstance(answer, list) else [answer]
    return [entry for entry in entries if isinstance(entry, Mapping)]


def find_report(answer: Any) -> dict[str, Any] | None:
    """Finds the report in an answer of the management API, however it is wrapped; None if there is none.

    TorchServe 0.12 answers a list with a dict per version, whose ``customizedMetadata`` is what `describe_handle`
    returned: a dict, the dict as a JSON string, or a list with it.
    """
    if isinstance(answer, str):
        try:
            decoded = parse_json(answer, allow_nan=True)
        except ValueError:
            return None
        return None if isinstance(decoded, str) else find_report(decoded)
    if isinstance(answer, list):
        return next((nested for item in answer if (nested := find_report(item)) is not None), None)
    if not isinstance(answer, dict):
        return None
    if "schema" in answer and isinstance(answer.get("summary"), dict):
        return answer
    return find_report(answer.get("customizedMetadata"))


def _no_report(answer: Any, name: str) -> ReportNotFoundError:
    for entry in _entries(answer):
        workers = [worker for worker in entry.get("workers") or [] if isinstance(worker, Mapping)]
        if workers and not any(worker.get("status") == "READY" for worker in workers):
            return ReportNotFoundError(
                f"no worker of {name!r} is READY yet; `torchserve-openvino why {name}` says why not."
            )
        metadata = entry.get("customizedMetadata")
        if metadata:
            return ReportNotFoundError(f"{name!r} answered without a compile report: {str(metadata)[:200]}")
    return OtherHandlerError(
        f"{name!r} is served by another handler: it has no compile report. Archive it with a handler of "
        "this package (torchserve-openvino handler-path) or derive yours from OpenVINOHandler."
    )
