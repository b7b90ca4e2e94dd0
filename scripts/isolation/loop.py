"""The other side of `process.Process`: one JSON line in, one JSON line out."""

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TextIO


def quietly() -> TextIO:
    """Keeps the protocol's lines clean: sends other output to stderr, and silences warnings and logs.

    Returns:
        The stream for answers.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    return answers


def serve(
    answers: TextIO, answer_to: Callable[[dict[str, Any]], dict[str, Any]], broken: Callable[[str], dict[str, Any]]
) -> Iterator[int]:
    """Answers each task; yields how many were answered, so that the caller can clean up in between.

    Args:
        answers: The stream from `quietly`.
        answer_to: Maps a task to its answer.
        broken: Maps a traceback to the answer of a task that raised.
    """
    for number, line in enumerate(sys.stdin, 1):
        try:
            answer = answer_to(json.loads(line))
        except Exception:
            answer = broken(traceback.format_exc())
        answers.write(json.dumps(answer) + "\n")
        yield number
