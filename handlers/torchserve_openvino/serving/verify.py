"""Whether the compiled model's answers equal eager PyTorch's, output by output."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchserve_openvino.backend.compare import largest_allowed, output_tensors, relative_tolerance, widened
from torchserve_openvino.config.sections import VerifySection
from torchserve_openvino.serving.warmup import Case

logger = logging.getLogger(__name__)

WORST = {"max_abs": max, "max_rel": max, "cosine": min, "top1_agreement": min}


def compare(
    compiled: Callable[..., Any],
    eager: Callable[..., Any],
    cases: Sequence[Case],
    *,
    precision: str,
    section: VerifySection,
) -> dict[str, Any]:
    """Runs both on each case.

    Args:
        precision: What the device infers with; decides the tolerance where ``section.max_abs`` is None.
        section: Tolerances.

    Returns:
        JSON-safe: ``passed``, ``cases``, ``tolerance``, ``problems``; the worst ``max_abs``, ``max_rel``, ``cosine``
        and ``top1_agreement`` (None where no output has classes); and ``outputs`` with these four for each output.
    """
    outputs: list[dict[str, float | None]] = []
    problems: list[str] = []
    for case in cases:
        args, kwargs = case.inputs
        with torch.inference_mode():
            got, expected = (output_tensors(model(*args, **kwargs)) for model in (compiled, eager))
        if len(got) != len(expected):
            problems.append(f"{case.name}: {len(got)} outputs instead of {len(expected)}")
            continue
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            if index == len(outputs):
                outputs.append({})
            found = _difference(a, b, precision, section, outputs[index])
            problems += [f"{case.name}, output {index}: {text}" for text in found]
    tolerance = f"{relative_tolerance(precision):g} of the largest value ({precision})"
    return {
        "passed": not problems,
        "against": "eager",
        "cases": len(cases),
        "tolerance": f"max_abs {section.max_abs:g}" if section.max_abs is not None else tolerance,
        **{name: _worst(name, [output.get(name) for output in outputs]) for name in WORST},
        "outputs": outputs,
        "problems": problems[:20],
    }


def _difference(
    a: torch.Tensor, b: torch.Tensor, precision: str, section: VerifySection, worst: dict[str, float | None]
) -> list[str]:
    """What is wrong with one output; its figures go into ``worst``."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return [f"is {list(a.shape)} {a.dtype} instead of {list(b.shape)} {b.dtype}"]
    figures = _figures(widened(a), widened(b))
    for name, value in figures.items():
        worst[name] = _worst(name, [worst.get(name), value])
    limit = section.max_abs if section.max_abs is not None else largest_allowed(b, precision)
    found = []
    if not torch.equal(a.isnan(), b.isnan()):
        found.append("is NaN at other places")
    if figures["max_abs"] > limit:
        found.append(f"differs by {figures['max_abs']:.3g}, more than {limit:.3g}")
    if section.min_cosine is not None and figures["cosine"] < section.min_cosine:
        found.append(f"has cosine {figures['cosine']:.6f}, less than min_cosine {section.min_cosine:g}")
    top1 = figures["top1_agreement"]
    if section.min_top1 is not None and top1 is not None and top1 < section.min_top1:
        found.append(f"agrees in {top1:.1%} of the largest values, less than min_top1 {section.min_top1:.1%}")
    return found


def _worst(name: str, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return WORST[name](known) if known else None


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.cat([torch.nan_to_num(flat, 0.0, 0.0, 0.0).reshape(-1), torch.zeros(1, dtype=flat.dtype)])


def _figures(a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs())
    x, y = _finite(a), _finite(b)
    norm = float(x.norm() * y.norm())
    top1 = None
    if a.dim() >= 2 and a.shape[-1] > 1 and a.numel() and not a.is_complex():
        top1 = float((a.argmax(-1) == b.argmax(-1)).double().mean())
    return {
        "max_abs": float(_finite(difference).max()) if bool(difference.isfinite().all()) else float("inf"),
        "max_rel": float(_finite(difference / b.abs().clamp_min(1e-6)).max()),
        "cosine": float(x @ y) / norm if norm else 1.0,
        "top1_agreement": top1,
    }


def failure(result: dict[str, Any]) -> str:
    """What a user should read and do about a comparison that failed."""
    return (
        f"answers differ from eager PyTorch: {'; '.join(result['problems'][:3])} (max abs {result['max_abs']}, cosine "
        f"{result['cosine']}; tolerance {result['tolerance']}). Set another INFERENCE_PRECISION_HINT, a larger "
        "handler.openvino.verify.max_abs, find the operator with disabled_ops, or say on_violation: warn."
    )
