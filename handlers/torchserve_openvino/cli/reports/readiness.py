"""Whether a model is ready: a worker answers its own warm-up sample rightly, and its policy holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from torchserve_openvino.cli.reports.source import (
    OtherHandlerError,
    ReportNotFoundError,
    entries_of,
    fetch,
    workers_in,
)
from torchserve_openvino.serving.requests.messages import HEALTH_HEADER

# The reason why a model is never ready.
OTHER_HANDLER = "its handler is not one of this package's, and does not tell of its health"

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


@dataclass(frozen=True)
class ServerAddress:
    """Where to ask.

    Attributes:
        url: Address for inference: of TorchServe, `serve`, Ray Serve or KServe.
        management: Address of TorchServe's management API; other hosts need none.
        token: TorchServe's management key, if it requires one.
        inference_token: TorchServe's inference key, if it requires one.
    """

    url: str
    management: str
    token: str | None = None
    inference_token: str | None = None


def not_ready(server: ServerAddress, model: str | None, seconds: float) -> str:
    """Returns why a model, or one of all models, is not ready; empty if they are.

    Args:
        server: Where to ask.
        model: ``NAME`` or ``NAME/VERSION``; None for all models.
        seconds: How long to wait for each answer.
    """
    try:
        with _client(server.url, seconds) as client:
            names = [model] if model is not None else _names(client, server, seconds)
            if not names:
                return f"{server.url} serves no model"
            problems = [(name, _problem(client, server, name, seconds)) for name in names]
    except httpx.ConnectError:
        return f"no server answers at {server.url} (--url)"
    except httpx.TimeoutException:
        return f"{server.url} did not answer within {seconds:g} s"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{server.url}: {error}"
    return "; ".join(f"{name}: {problem}" for name, problem in problems if problem)


def _client(url: str, seconds: float) -> httpx.Client:
    # A proxy set in the environment can't reach this machine's loopback.
    return httpx.Client(trust_env=urlsplit(url).hostname not in _LOOPBACK, timeout=seconds)


def _names(client: httpx.Client, server: ServerAddress, seconds: float) -> Sequence[str]:
    """Returns all models: from the host itself, or from TorchServe's management API."""
    headers = {"Authorization": f"Bearer {server.token}"} if server.token else {}
    refused: httpx.ConnectError | None = None
    for url in (f"{server.url}/models", f"{server.management}/models", f"{server.url}/v1/models"):
        try:
            answer = client.get(url, headers=headers if url.startswith(server.management) else {})
            body = answer.json()
        except httpx.ConnectError as error:
            refused = error if url.startswith(server.url) else refused
            continue
        except ValueError:
            continue
        entries = body.get("models") or body.get("data") or [] if answer.is_success and isinstance(body, dict) else []
        if names := [_name(entry) for entry in entries]:
            return [name for name in names if name]
    if refused is not None:
        raise refused
    return []


def _name(entry: Any) -> str:
    if not isinstance(entry, dict):
        return str(entry)
    name = str(entry.get("modelName") or entry.get("id") or "")
    # TorchServe's own list names only the default version.
    return f"{name}/{entry['modelVersion']}" if "modelVersion" in entry else name


def _problem(client: httpx.Client, server: ServerAddress, model: str, seconds: float) -> str:
    states, step = _workers(server, model, seconds)
    if states and "READY" not in states:
        return f"no worker is READY: {step or 'it loads, or has ended'}"
    headers = {HEALTH_HEADER: "1", "content-type": "application/json"}
    if server.inference_token:
        headers["Authorization"] = f"Bearer {server.inference_token}"
    try:
        answer = client.post(f"{server.url}/predictions/{quote(model)}", content=b"{}", headers=headers)
        if answer.status_code == httpx.codes.NOT_FOUND:
            name, _, version = model.partition("/")
            path = f"{quote(name)}/versions/{quote(version)}" if version else quote(name)
            other = client.get(f"{server.url}/v2/models/{path}/ready")
            if other.status_code != httpx.codes.NOT_FOUND:
                answer = other
    except httpx.TimeoutException:
        return f"no worker answered within {seconds:g} s: it hangs, is busy, or its queue is long"
    problem = _verdict(answer)
    if problem.startswith("5") and _has_other_handler(server, model, seconds):
        # What it raised is about the probe, which was not for it.
        return OTHER_HANDLER
    return problem


def _has_other_handler(server: ServerAddress, model: str, seconds: float) -> bool:
    try:
        fetch(model, management=server.management, token=server.token, timeout=seconds)
    except OtherHandlerError:
        return True
    except ReportNotFoundError:
        return False
    return False


def _workers(server: ServerAddress, model: str, seconds: float) -> tuple[set[str], str]:
    """Returns the states of a model's workers, none where no management API shows them, and what `serve` loads now."""
    for address in dict.fromkeys((server.url, server.management)):
        try:
            entries = entries_of(model, management=address, token=server.token, timeout=min(seconds, 5.0))
        except ReportNotFoundError:
            continue
        # Ray Serve answers with a replica's report, which knows its siblings, but not their states.
        if states := {str(worker["status"]) for worker in workers_in(entries) if "status" in worker}:
            return states, str(entries[0].get("step") or "")
    return set(), ""


def _verdict(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    body = body if isinstance(body, dict) else {}
    if answer.is_success and (body.get("healthy") is True or body.get("ready") is True):
        return ""
    if "healthy" in body or "ready" in body:
        return str(body.get("reason") or "its worker is not healthy")
    if answer.is_success:
        return OTHER_HANDLER
    if "html" in answer.headers.get("content-type", "") or answer.text.lstrip()[:1] == "<":
        return f"another program answers there ({answer.status_code}, a page)"
    message = str(body.get("message") or body.get("detail") or body.get("error") or answer.text.strip())
    return f"{answer.status_code}: {' '.join(message.split())[:300]}"
