"""What a start with untested versions does: it runs the probes once for each set of versions, then warns or refuses."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchserve_openvino.cache.identity.versions import source_digest
from torchserve_openvino.errors import UntestedVersionError
from torchserve_openvino.files.atomic import write_atomically
from torchserve_openvino.files.json_text import read_json
from torchserve_openvino.serving.versions.tested import described, installed, untested

logger = logging.getLogger(__name__)
_SECONDS = 300
# What an outcome is about that says nothing of the versions.
_PROBES = "the probes"


def admit_versions(folder_of: Callable[[], Path | None]) -> str:
    """Tries what this package relies on, if it was not tested with a package's version.

    The outcome is remembered for this set of versions and this state of the package.

    Args:
        folder_of: Returns where outcomes are remembered; None if no folder can be written.

    Returns:
        A warning; empty if all versions are tested ones.

    Raises:
        UntestedVersionError: Something that is relied on does not hold.
    """
    news = untested()
    if not news:
        return ""
    folder = folder_of()
    known = None if folder is None else folder / f"{_identity()}.json"
    outcomes = _remembered(known)
    if outcomes is None:
        logger.warning("Not tested with %s: trying what is relied on, once", described(news))
        outcomes = _tried(news)
        # A process that was killed, or late, may end another time.
        if known is not None and not any(outcome["about"] == _PROBES for outcome in outcomes):
            _remember(known, outcomes)
    failed = [f"{outcome['about']}: {outcome['error']}" for outcome in outcomes if outcome["error"]]
    if failed:
        raise UntestedVersionError(
            f"This package was not tested with {described(news)}, and does not work with it: {'; '.join(failed)}. "
            "Install a tested version, or run `torchserve-openvino selftest` and report what it prints."
        )
    return (
        f"Not tested with {described(news)}. All {len(outcomes)} things that are relied on hold "
        "(torchserve-openvino selftest)"
    )


def _identity() -> str:
    versions = "-".join(f"{name}{version}" for name, version in installed().items()).replace("/", "")
    return f"versions-{versions}-{source_digest('backend', 'ops', 'serving')}"


def _tried(news: Mapping[str, str]) -> list[dict[str, Any]]:
    """Runs the probes in a process of their own, which may die or hang and leaves no traces in this one."""
    command = [sys.executable, "-m", "torchserve_openvino.serving.versions", *news]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [{"about": _PROBES, "error": f"they did not end within {_SECONDS} s"}]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"about"')]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        lines.append({"about": _PROBES, "error": f"their process ended with {done.returncode}: {last}"})
    return lines


def _remembered(path: Path | None) -> list[dict[str, Any]] | None:
    if path is None or not path.is_file():
        return None
    try:
        entries = read_json(path)
        return [{"about": str(entry["about"]), "error": str(entry["error"])} for entry in entries]
    except (OSError, ValueError, TypeError, KeyError):
        logger.warning("%s can't be read: the probes run again", path)
        return None


def _remember(path: Path, outcomes: list[dict[str, Any]]) -> None:
    try:
        write_atomically(path, json.dumps(outcomes).encode(), sync=False)
    except OSError as error:
        logger.warning("What the probes found is not remembered: %s", error)
