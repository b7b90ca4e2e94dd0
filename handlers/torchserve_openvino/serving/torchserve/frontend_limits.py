"""How long an answer TorchServe's frontend takes: it ends a worker that sends a longer one, with all it works on."""

import itertools
import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from torchserve_openvino.serving.torchserve.context import Context

logger = logging.getLogger(__name__)

# TorchServe's default of max_response_size, in bytes.
DEFAULT = 6_553_500
_KEY = "max_response_size"
# Names of the argument by which TorchServe's launcher passes config.properties on to the frontend.
_ARGUMENTS = ("-f", "--ts-config-file")
# What the frontend reads in its folder if it gets no file.
_FILE = "config.properties"


def most_response_bytes(context: Any) -> int | None:
    """Returns the longest body that the host sends; None on other hosts than TorchServe, which have no limit.

    Args:
        context: The context of a call, or of the handler.
    """
    return None if isinstance(context, Context) else _of_parent()


@cache
def _of_parent() -> int:
    """Returns the limit of the frontend that started this worker.

    A worker gets none of the frontend's settings. But the frontend is its parent, whose arguments name the file.
    """
    try:
        frontend = psutil.Process(os.getppid())
        return stated_limit(frontend.cmdline(), Path(frontend.cwd()), frontend.environ())
    except (psutil.Error, OSError) as error:
        logger.debug("TorchServe's settings cannot be read, so max_response_size counts as %d: %s", DEFAULT, error)
        return DEFAULT


def stated_limit(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Returns the ``max_response_size`` of a frontend.

    Args:
        arguments: Its command line.
        folder: Its working folder.
        environment: Its environment variables, which count with ``enable_envvars_config=true``.
    """
    named = next((after for name, after in itertools.pairwise(arguments) if name in _ARGUMENTS), _FILE)
    path = folder / named
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    stated = _value(text, _KEY)
    if (_value(text, "enable_envvars_config") or "").lower() == "true":
        stated = environment.get(f"TS_{_KEY.upper()}", stated)
    return int(stated) if stated is not None and stated.isdecimal() else DEFAULT


def _value(text: str, key: str) -> str | None:
    """Returns the last value of a key in Java's format of properties."""
    values = re.findall(rf"^[ \t]*{key}[ \t]*[=: \t][ \t]*(.*?)[ \t\r]*$", text, re.MULTILINE)
    return values[-1] if values else None
