"""The fields of cache keys: everything that an entry depends on, listed in one place.

An entry is found by a digest of its fields. It also stores the fields, so that a miss can report which one differs.

- A ``call`` is one input signature of one model: how to run it without tracing. It is the same on every device.
- A ``partition`` is one subgraph as OpenVINO's IR, with its inputs and outputs. It is the same on every device.
- A ``blob`` is a partition compiled for one device with one configuration.
- A ``precision`` is what ``handler.openvino.precision: auto`` decided for a model on one device.
- A ``placement`` is which partitions and calls of a model eager PyTorch runs because it is faster (`serving.slower`).
- A ``generator`` is a language model as OpenVINO's IR, with its cache as state. It is the same on every device.
- A ``proof`` is what eager PyTorch generated for some prompts, and how near the logits of a generator came.
"""

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

# Must change whenever the meaning of an entry's content does.
FORMAT = 1

_VERSIONS = ("format", "package", "torch", "openvino")

FIELDS: dict[str, tuple[str, ...]] = {
    "call": (
        *_VERSIONS,
        "python",  # Byte code, on which the digest of the model's code depends, differs by version.
        "code",
        "weights",
        "signature",  # Structure, shapes, types and plain values of the inputs; grad mode and autocast.
        "options",  # The options that `OPTIONS` assigns to ``graph``.
        "arguments",  # The arguments that `ARGUMENTS` assigns to ``graph``.
        "mappings",  # The user's conversions of operators and modules.
        "passes",  # Name and digest of each pass that a graph goes through, in their order.
        "torch_state",  # Process-wide settings that tracing reads: default dtype, torch.backends, Dynamo.
    ),
    "partition": (
        *_VERSIONS,
        "graph",  # Operators, arguments, specs of inputs and outputs.
        "constants",  # Content of the weights that are frozen into the partition.
        "mappings",  # The user's conversions, with the attributes of the modules that they convert.
        "converter",  # Conversion path to IR: FX or TorchScript.
        "passes",  # As of a call.
    ),
    "blob": (
        *_VERSIONS,
        "partition",  # Key of the partition.
        "device",
        "device_name",  # Full name of each hardware device behind ``device``.
        "capabilities",  # What these devices compute fast according to OpenVINO, and the CPU's instruction set.
        "ov_config",
        "passes",  # The passes that depend on ``ov_config`` and the number of cores.
    ),
    "precision": (
        *_VERSIONS,
        "code",
        "weights",
        "quantized",  # Weights of the quantized model beside it; empty if there is none.
        "judged_by",  # Bounds that the candidates had to meet.
        "options",  # As of a call.
        "arguments",  # How the model is captured and converted, with the mappings, and which sizes are left open.
        "cases",  # Names, shapes, types and modes of the calls that are compiled.
        "device",
        "device_name",
        "capabilities",
        "ov_config",  # Without `RUN_PROPERTIES`, so that the decision holds for any number of workers.
        "passes",  # All of them: they decide how fast a precision is.
    ),
    "placement": (
        *_VERSIONS,
        "code",
        "weights",
        "partitions",  # Names and operators.
        "options",  # As of a precision, like the next two.
        "arguments",
        "cases",
        "may_leave",  # Whether the fallback policy lets partitions run in eager PyTorch.
        "device",
        "device_name",
        "capabilities",
        "ov_config",  # With the number of threads.
        "torch_threads",
        "cores",  # How many the process may use.
        "passes",  # All of them: they decide how fast a partition is.
    ),
    "generator": (
        *_VERSIONS,
        "exporter",  # Digest of the sources in generation/text.
        "transformers",
        "model",  # Content of configuration and weights.
        "weights",  # Format: f32, int8 or int4.
        "compression",  # Size of groups and version of NNCF, for the compressed formats.
        "passes",  # As of a blob: `split_gated_products`, where the CPU plugin would die of gated products.
    ),
    "proof": (
        *_VERSIONS,
        "generator",  # Key of the generator.
        "prompts",  # Tokens of the prompts, and how many tokens each gets.
        "device",
        "device_name",
        "capabilities",
        "ov_config",  # Without `RUN_PROPERTIES`.
    ),
    "verdict": (
        *_VERSIONS,
        "proof",  # Key of the proof.
        "engine",  # Digest of the sources in generation/text.
        "openvino_genai",
        "section",  # What of the configuration changes how prompts share steps.
        "verify",  # The tolerances.
    ),
}

# Which key each option of `BackendOptions` is part of: a call's (``graph``), a blob's (``device``), or none
# (``nowhere``) because no result depends on it. Every new option must be added; tests/unit/cache/test_key.py checks it.
OPTIONS: dict[str, str] = {
    "device": "device",
    "aot_autograd": "nowhere",  # Graphs are always lowered through AOTAutograd.
    "model_caching": "nowhere",
    "cache_dir": "nowhere",
    "decompositions": "graph",
    "disabled_ops": "graph",
    "config": "device",
    "precision": "device",  # As the property INFERENCE_PRECISION_HINT.
    "testing": "nowhere",  # Upstream's flag; it only sets `min_partition_us`.
    "fallback_to": "graph",
    "min_partition_us": "graph",
    "verify": "nowhere",  # Only compares results.
}

# The same for the arguments of `torchserve_openvino.compile`.
ARGUMENTS: dict[str, str] = {
    "model": "graph",  # By its fingerprint.
    "dynamic": "graph",
    "options": "graph",  # Each one by itself, as in `OPTIONS`.
    "fullgraph": "nowhere",  # Forbids graph breaks; calls with graph breaks are never stored.
    "mode": "nowhere",  # Only for backends of others, such as inductor, which are not cached here.
    "backend": "graph",  # Selects how the graph is captured and converted.
    "resolved": "graph",  # The options, validated.
    "own_weights": "nowhere",  # Only decides whether the compiled model has its own copy of the weights.
    "cache": "nowhere",
    "instrumentation": "nowhere",  # Only for diagnosis, which does not use the cache.
    "cautious": "nowhere",  # Only for diagnosis.
    "captures": "nowhere",  # Saves tracing the same model again; the graphs are the same.
    "tracker": "nowhere",
    "open_axes": "graph",
    "methods": "nowhere",  # Each is compiled by itself, and is identified as a model of its own.
}

# OpenVINO properties that affect how a compiled model runs, not what it computes. `import_model` applies them anew, so
# the same blob serves any number of workers; see tests/contract/test_openvino_blobs.py.
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
    """Returns those of the given options that are part of a call's key."""
    return {name: values[name] for name in sorted(values) if OPTIONS.get(name) == "graph"}


def make_key(kind: str, fields: Mapping[str, Any]) -> str:
    """Returns the key of an entry, a digest of 64 hexadecimal digits.

    Raises:
        KeyError: A field is missing or not listed in `FIELDS`.
    """
    if fields.keys() != set(FIELDS[kind]):
        raise KeyError(f"fields of a {kind}: {sorted(fields.keys() ^ set(FIELDS[kind]))} missing or unknown")
    return digest({"kind": kind, **fields})


def digest(value: Any) -> str:
    """Returns the digest of a JSON-safe value; the order of keys does not matter."""
    return blake3(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
