"""Isolates the items of a batch: a batch that fails is run item by item, so that only the faulty items fail."""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torchserve_openvino.errors import (
    ItemError,
    ModelCallError,
    OutOfMemoryError,
    PayloadTooLargeError,
    class_and_line,
    is_out_of_memory,
)
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.requests.refusals import is_status

logger = logging.getLogger(__name__)

Run = Callable[[list[Any]], list[Any]]
Blame = Callable[[Any, Exception], ItemError]
T = TypeVar("T")


def isolated(run: Callable[[], T]) -> T | ItemError:
    """Returns the result of ``run``, which reads or writes one item, or the refusal of this item; raises nothing."""
    try:
        return run()
    except ItemError as error:
        return error
    except Exception as error:
        if is_out_of_memory(error):
            # The failed allocation took no memory from the other items.
            return PayloadTooLargeError("this worker has not enough memory for this item")
        return server_fault(error)


def run_isolated(values: Sequence[Any], run: Run, blame: Blame, counters: Counters) -> list[Any]:
    """Runs a batch; after a failure, runs each item by itself.

    Args:
        values: The items.
        run: Maps a batch of items to as many answers; an answer may be an `ItemError`.
        blame: Maps an item, and the error that it raised alone, to its refusal.
        counters: Counts ``retried_batches``.

    Returns:
        An answer or an `ItemError` for each item, in order.
    """
    try:
        return _checked(run(list(values)), len(values))
    except Exception as error:
        if len(values) == 1 and is_out_of_memory(error):
            return [OutOfMemoryError("this worker has not enough memory for this item")]
        if len(values) == 1:
            return [error if isinstance(error, ItemError) else blame(values[0], error)]
        logger.warning(
            "A batch of %d failed (%s: %s); its items run one by one", len(values), type(error).__name__, error
        )
    counters.add("retried_batches")
    return [run_isolated([value], run, blame, counters)[0] for value in values]


def _checked(answers: list[Any], count: int) -> list[Any]:
    if not isinstance(answers, list) or len(answers) != count:
        got = f"{len(answers)} answers" if isinstance(answers, list) else type(answers).__name__
        raise RuntimeError(f"the handler returned {got} for {count} item(s); it must return a list with one for each")
    return answers


def server_fault(error: BaseException) -> ItemError:
    """Returns the refusal of an item after a server error, with TorchServe's own status where the error has one."""
    # An error of TorchServe's own class can only come from code that has imported it.
    upstream = sys.modules.get("ts.utils.util")
    if upstream is not None and isinstance(error, upstream.PredictionException):
        refusal: ItemError = ModelCallError(str(error.message))
        if is_status(error.error_code):
            refusal.status = int(error.error_code)
        return refusal
    logger.error("One item failed because of a server error", exc_info=error)
    return ModelCallError(f"the server failed on this item: {class_and_line(error)}")
