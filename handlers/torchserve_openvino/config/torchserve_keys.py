"""TorchServe's own top-level keys of model-config.yaml.

Source: ``ModelConfig.build`` of TorchServe 0.12's frontend, and the sections that its Python side and its
examples read. TorchServe itself only logs a warning about a wrong value, and continues with the default.
"""

from collections.abc import Mapping
from typing import Any

from torchserve_openvino.config.problems import Problems
from torchserve_openvino.config.spelling import listed, nearest, shown

# Smallest value that TorchServe does not replace by its default.
INTEGERS: dict[str, int] = {
    "minWorkers": 1,
    "maxWorkers": 1,
    "batchSize": 1,
    "maxBatchDelay": 0,
    "responseTimeout": 1,
    "startupTimeout": 1,
    "maxRetryTimeoutInSec": 0,
    "clientTimeoutInMills": 0,
    "jobQueueSize": 1,
    "sequenceMaxIdleMSec": 0,
    "sequenceTimeoutMSec": 0,
    "maxSequenceJobQueueSize": 1,
    "maxNumSequence": 1,
    "parallelLevel": 1,
}
BOOLEANS = frozenset({"useJobTicket", "continuousBatching", "sequenceBatching", "asyncCommunication", "useVenv"})
WORDS: dict[str, tuple[str, ...]] = {
    "deviceType": ("cpu", "gpu"),
    "parallelType": ("pp", "tp", "pptp", "custom"),
}
TORCHRUN = frozenset(
    {
        "nnodes",
        "nproc-per-node",
        "rdzv-backend",
        "rdzv-endpoint",
        "rdzv-id",
        "rdzv-conf",
        "max-restarts",
        "monitor-interval",
        "node-rank",
        "OMP_NUMBER_THREADS",
    }
)
# Read by TorchServe's handlers and examples, not by its frontend; kept unchanged.
SECTIONS = frozenset({"pippy", "deepspeed", "dali", "micro_batching", "rpc", "tp", "vllm", "torch_xla", "fsdp"})
OURS = frozenset({"pt2", "handler"})
ALL = frozenset(INTEGERS) | BOOLEANS | frozenset(WORDS) | SECTIONS | OURS | {"deviceIds", "torchrun"}


def check_torchserve_keys(data: Mapping[Any, Any], problems: Problems) -> dict[str, Any]:
    """Checks TorchServe's part of the configuration and returns it, with unchanged values.

    Args:
        data: The whole model-config.yaml.
        problems: Collects each unknown key and each value that TorchServe would replace by its default.
    """
    checked: dict[str, Any] = {}
    for key, value in data.items():
        if key in OURS:
            continue
        if key not in ALL:
            _unknown(str(key), problems)
            continue
        checked[key] = value
        _check_value(key, value, problems)
    low, high = checked.get("minWorkers"), checked.get("maxWorkers")
    if isinstance(low, int) and isinstance(high, int) and low > high:
        problems.add(("maxWorkers",), f"is {high}, less than minWorkers, which is {low}.")
    return checked


def _unknown(key: str, problems: Problems) -> None:
    if key == "openvino":
        problems.add((key,), "belongs under 'handler', not at the top level.", suggestion="handler.openvino")
        return
    message = "unknown key of TorchServe and of this package. A handler's own settings belong under 'handler:'."
    problems.add((key,), message, suggestion=nearest(key, ALL))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_value(key: str, value: Any, problems: Problems) -> None:
    if key in INTEGERS:
        if not _is_int(value) or value < INTEGERS[key]:
            problems.add((key,), f"must be an integer of at least {INTEGERS[key]}, not {shown(value)}.")
    elif key in BOOLEANS:
        if not isinstance(value, bool):
            problems.add((key,), f"must be true or false, not {shown(value)}.")
    elif key in WORDS:
        if value not in WORDS[key]:
            hint = nearest(str(value), WORDS[key])
            problems.add((key,), f"must be one of {listed(WORDS[key])}, not {shown(value)}.", suggestion=hint)
    elif key == "deviceIds":
        if not isinstance(value, list) or not all(_is_int(item) and item >= 0 for item in value):
            problems.add((key,), f"must be a list of integers, not {shown(value)}.")
    elif key == "torchrun":
        _check_torchrun(value, problems)


def _check_torchrun(value: Any, problems: Problems) -> None:
    if not isinstance(value, Mapping):
        problems.add(("torchrun",), f"must be a mapping, not {shown(value)}.")
        return
    for key in value:
        if key not in TORCHRUN:
            hint = nearest(str(key), TORCHRUN)
            problems.add(("torchrun", str(key)), "unknown torchrun setting of TorchServe.", suggestion=hint)
