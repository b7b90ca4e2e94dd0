"""What a cache entry depends on: every field by name, in one place.

An entry is found by a digest over its fields and keeps them, so that a miss can say which field differs.

- A ``call`` is one input signature of one model: how to run it without tracing. It is the same on every device.
- A ``partition`` is one subgraph as OpenVINO's IR, with what goes in and comes out. It is the same on every device.
- A ``blob`` is a partition compiled for one device with one configuration.
- A ``precision`` is what ``handler.openvino.precision: auto`` decided for a model on one device.
"""

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

# Changes whenever the meaning of an entry's content does.
FORMAT = 1

_VERSIONS = ("format", "package", "torch", "openvino")

FIELDS: dict[str, tuple[str, ...]] = {
    "call": (
        *_VERSIONS,
        "python",  # The digest of the model's code is over byte code.
        "code",
        "weights",
        "signature",  # Structure, shapes, types and plain values of the inputs; grad mode and autocast.
        "options",  # Those of `OPTIONS` that are of the graph.
        "arguments",  # Those of `ARGUMENTS` that are of the graph.
        "mappings",  # The user's conversions of operators and modules.
        "torch_state",  # Switches of the whole process that tracing reads: default type, torch.backends, Dynamo's own.
    ),
    "partition": (
        *_VERSIONS,
        "graph",  # Operators, arguments, specs of inputs and outputs.
        "constants",  # Content of the weights that are frozen into it.
        "mappings",  # The user's conversions, with the attributes of modules that they convert.
        "converter",  # Through FX or TorchScript.
    ),
    "blob": (
        *_VERSIONS,
        "partition",  # Its key.
        "device",
        "device_name",  # Full name of each hardware device behind it.
        "capabilities",  # What OpenVINO says these compute fast, and the CPU's instruction set.
        "ov_config",
    ),
    "precision": (
        *_VERSIONS,
        "code",
        "weights",
        "cases",  # Names of the shapes that were timed.
        "device",
        "device_name",
        "capabilities",
        "ov_config",  # Without those of `RUN_PROPERTIES`: another number of workers follows the same decision.
    ),
}

# Where each option of `BackendOptions` stands: in a call's key (``graph``), in a blob's (``device``), or nowhere,
# because no answer depends on it. A new option must be entered here; tests/unit/cache/test_key.py compares.
OPTIONS: dict[str, str] = {
    "device": "device",
    "aot_autograd": "nowhere",  # Graphs are always lowered through AOTAutograd.
    "model_caching": "nowhere",
    "cache_dir": "nowhere",
    "decompositions": "graph",
    "disabled_ops": "graph",
    "config": "device",
    "testing": "nowhere",  # Accepted for OpenVINO's sake; single operators are always handed over.
    "fallback_to": "graph",
    "min_partition_us": "graph",
}

# The same for the arguments of `torchserve_openvino.compile`.
ARGUMENTS: dict[str, str] = {
    "model": "graph",  # By its fingerprint.
    "dynamic": "graph",
    "options": "graph",  # One by one, above.
    "fullgraph": "nowhere",  # It forbids graph breaks; what has one is never stored as a call.
    "mode": "nowhere",  # Of foreign backends, which are not cached here.
    "backend": "graph",  # Who captures, and who converts.
    "resolved": "graph",  # The options again.
    "own_weights": "nowhere",  # Decides who keeps the memory.
    "cache": "nowhere",
    "instrumentation": "nowhere",  # A diagnosis, without a cache.
    "tracker": "nowhere",
    "open_axes": "graph",
}

# OpenVINO properties that say how a compiled model is run, not what it computes: `import_model` takes them anew, so
# that another number of workers finds the same blob. tests/contract/test_openvino_blobs.py shows it.
RUN_PROPERTIES = frozenset(
    {
        "CACHE_DIR",
        "CPU_RUNTIME_CACHE_CAPACITY",
        "ENABLE_CPU_PINNING",
        "INFERENCE_NUM_THREADS",
        "LOG_LEVEL",
        "NUM_STREAMS",
    }
)


def graph_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a mapping of options that belong into a call's key."""
    return {name: values[name] for name in sorted(values) if OPTIONS.get(name) == "graph"}


def make_key(kind: str, fields: Mapping[str, Any]) -> str:
    """The digest of an entry, 64 hexadecimal digits.

    Raises:
        KeyError: A field is missing or not listed in `FIELDS`.
    """
    if fields.keys() != set(FIELDS[kind]):
        raise KeyError(f"fields of a {kind}: {sorted(fields.keys() ^ set(FIELDS[kind]))} missing or unknown")
    return digest({"kind": kind, **fields})


def digest(value: Any) -> str:
    """Of any JSON-safe value; order of keys does not matter."""
    return blake3(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
