"""Whether the compiled model's answers equal eager PyTorch's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchserve_openvino.serving.warmup import Inputs

# Largest difference relative to the largest value of the output. float32: summation order over some thousand terms;
# bfloat16 keeps 8 bits of mantissa, float16 11: their rounding adds up over the layers of a network.
RELATIVE_TOLERANCE = {"f32": 1e-3, "f16": 2e-2, "bf16": 6e-2}


def compare(
    compiled: Callable[..., Any],
    eager: Callable[..., Any],
    batches: Sequence[Inputs],
    *,
    precision: str,
    max_abs: float | None,
) -> dict[str, Any]:
    """Runs both on each batch.

    Args:
        precision: What the device infers with; decides the tolerance where ``max_abs`` is None.
        max_abs: Largest absolute difference that is accepted.

    Returns:
        JSON-safe: ``passed``, ``batches``, ``tolerance`` and the worst ``max_abs``, ``max_rel``, ``cosine`` and
        ``top1_agreement`` over all outputs.
    """
    worst = {"max_abs": 0.0, "max_rel": 0.0, "cosine": 1.0, "top1_agreement": 1.0}
    passed = True
    relative = RELATIVE_TOLERANCE.get(precision, RELATIVE_TOLERANCE["bf16"])
    for args, kwargs in batches:
        with torch.inference_mode():
            got, expected = _tensors(compiled(*args, **kwargs)), _tensors(eager(*args, **kwargs))
        passed &= len(got) == len(expected)
        for a, b in zip(got, expected, strict=False):
            if a.shape != b.shape or a.dtype != b.dtype:
                passed = False
                continue
            figures = _figures(a.double(), b.double())
            limit = max_abs if max_abs is not None else relative * max(1.0, float(_finite(b.double()).abs().max()))
            passed &= figures["max_abs"] <= limit and torch.equal(a.isnan(), b.isnan())
            for name in ("max_abs", "max_rel"):
                worst[name] = max(worst[name], figures[name])
            for name in ("cosine", "top1_agreement"):
                worst[name] = min(worst[name], figures[name])
    tolerance = f"max_abs {max_abs:g}" if max_abs is not None else f"{relative:g} of the largest value ({precision})"
    return {"passed": bool(passed), "against": "eager", "batches": len(batches), "tolerance": tolerance} | worst


def _tensors(output: Any) -> list[torch.Tensor]:
    plain = dict(output) if hasattr(output, "keys") else output
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.nan_to_num(tensor, 0.0, 0.0, 0.0).reshape(-1), torch.zeros(1, dtype=tensor.dtype)])


def _figures(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs())
    x, y = _finite(a), _finite(b)
    norm = float(x.norm() * y.norm())
    top1 = 1.0
    if a.dim() >= 2 and a.shape[-1] > 1:
        top1 = float((a.argmax(-1) == b.argmax(-1)).double().mean())
    return {
        "max_abs": float(_finite(difference).max()) if bool(difference.isfinite().all()) else float("inf"),
        "max_rel": float(_finite(difference / b.abs().clamp_min(1e-6)).max()),
        "cosine": float(x @ y) / norm if norm else 1.0,
        "top1_agreement": top1,
    }
