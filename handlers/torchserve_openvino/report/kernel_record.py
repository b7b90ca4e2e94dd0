"""Kernels as plain data: which ran, at which precision, for how long."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# The plugin's words for layers that have kernels of 8 bits, and for the precisions of others.
_LAYERS = {"Convolution", "FullyConnected", "MatMul"}
_FLOATS = {"f32", "bf16x3", "bf16", "f16"}
# The end of the names of operators that the precision bf16x3 adds.
BF16X3_SUFFIX = "/bf16x3"


@dataclass(frozen=True)
class Kernel:
    """One node of a compiled model that computes.

    Attributes:
        kind: The plugin's word, such as ``Convolution``.
        precision: In which it computes: ``f32``, ``bf16x3``, ``bf16``, ``f16``, ``u8``, ``i8``, ``u4``, ...
        primitive: The implementation, such as ``brgconv_avx512_vnni_u8``.
        operators: Names of the operations that were fused into it.
        seconds: Average time of a call; None if it never ran, or its time is not counted.
    """

    kind: str
    precision: str
    primitive: str
    operators: tuple[str, ...]
    seconds: float | None


def precisions(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Returns the share of time in each precision, largest first; the share of kernels if no time is known."""
    known = list(kernels)
    timed = any(kernel.seconds for kernel in known)
    shares: dict[str, float] = defaultdict(float)
    for kernel in known:
        shares[kernel.precision] += (kernel.seconds or 0.0) if timed else 1.0
    total = sum(shares.values())
    rounded = {name: round(share / total, 4) for name, share in shares.items()}
    return {name: share for name, share in sorted(rounded.items(), key=lambda each: -each[1]) if share}


def by_kind(kernels: Iterable[Kernel]) -> list[dict[str, Any]]:
    """Returns kernels of the same kind and precision together, those that take longest first."""
    groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.kind, kernel.precision].append(kernel)
    rows = [
        {
            "kind": kind,
            "precision": precision,
            "count": len(group),
            "seconds": None if all(k.seconds is None for k in group) else round(sum(k.seconds or 0 for k in group), 7),
        }
        for (kind, precision), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -(row["seconds"] or 0.0))


def quantizes(op_counts: Mapping[str, int]) -> bool:
    """Whether a graph with these operators computes activations in 8 bits."""
    return any(name.startswith("quantized_decomposed.quantize_per_") for name in op_counts)


def kept_in_floats(kernels: Iterable[Kernel], float_layers: Mapping[str, int]) -> list[dict[str, Any]]:
    """Says what kept the layers of a quantised partition from computing in 8 bits.

    Args:
        kernels: Of the partition.
        float_layers: `PartitionRecord.float_layers`.

    Returns:
        ``op``, ``count`` and ``why`` of each: layers whose input is not quantised, by operator; the rest by kernel.
    """
    layers = [{"op": name, "count": count, "why": "its input is not quantised"} for name, count in float_layers.items()]
    left = sum(float_layers.values())
    for kernel, count in Counter(k.kind for k in kernels if k.kind in _LAYERS and k.precision in _FLOATS).items():
        more, left = max(0, count - left), max(0, left - count)
        if more:
            layers.append({"op": kernel, "count": more, "why": "OpenVINO has no kernel of 8 bits for this form of it"})
    return layers
