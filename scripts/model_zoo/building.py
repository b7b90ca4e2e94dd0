"""Builds an architecture for a case, and finds inputs that it accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from model_zoo import catalog, inputs, weights
from model_zoo.catalog import Architecture
from model_zoo.grid import COMMON, Case
from model_zoo.overrides import LEFT_OUT
from model_zoo.shrinking import small

# A second or two for a case.
_MOST_PARAMETERS = 90_000_000
# Since transformers 5.2x all caches are one argument, `cache`.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_ROWS = 2
# What the second call has more with symbolic sizes.
_MORE = 3


class NotBuiltError(Exception):
    """An architecture that can't be built small, or whose inputs are unknown."""


@dataclass
class Subject:
    """A model to run, with what it takes.

    Attributes:
        model: In evaluation mode, in float32.
        draw: Draws the inputs of a call: its number (0 or 1), and whether it has other sizes than the first.
        kind: ``text``, ``vision``, ``audio`` or ``other``.
        names: Arguments of its forward.
        axes: Axes of the grid that change something.
        cache_name: The argument for the cache of earlier tokens; empty without one.
    """

    model: torch.nn.Module
    draw: Callable[[int, bool], inputs.Inputs]
    kind: str
    names: frozenset[str]
    axes: frozenset[str] = COMMON
    cache_name: str = ""


def build(architecture: Architecture, case: Case) -> Subject:
    """Builds a model.

    Raises:
        NotBuiltError: With the reason.
    """
    if reason := LEFT_OUT.get(architecture.name):
        raise NotBuiltError(reason)
    torch.manual_seed(0)
    try:
        return _BUILDERS[architecture.source](architecture, case)
    except NotBuiltError:
        raise
    except Exception as error:
        raise NotBuiltError(_line(error)) from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _transformers(architecture: Architecture, case: Case) -> Subject:
    import transformers

    model_class = getattr(transformers, architecture.class_name)
    published = model_class.config_class()
    config = small(published, case, architecture.name)
    other = small(published, Case(head=64 if case.head != 64 else 128, length=case.length), architecture.name)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(config).parameters())
    if count > _MOST_PARAMETERS:
        raise NotBuiltError(f"too large: {count / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = model_class(config).eval().float()
    weights.draw(model)
    names = inputs.forward_names(model)

    def draw(number: int, changed: bool, form: Callable[[inputs.Draw], inputs.Inputs]) -> inputs.Inputs:
        # A text of another length; of pictures and recordings, which may have one size only, another number.
        text = model.main_input_name == "input_ids"
        length = case.length + (_MORE if changed and text else 0)
        rows = _ROWS + (1 if changed and not text else 0)
        return form(inputs.Draw(config, names, case, length, rows, seed=number))

    form = _accepted(model, names, case, config)
    first = draw(0, False, form)
    cache = next((name for name in CACHE_NAMES if name in names), "")
    cache = cache if _caches(config) and _CONTINUABLE.intersection(first) else ""
    masks = any("mask" in name for name in first) and case.length > 1
    traits = {"head": config.to_dict() != other.to_dict(), "padding": masks, "cache": bool(cache), "length": True}
    axes = COMMON.union(axis for axis, applies in traits.items() if applies)
    return Subject(model, lambda number, changed: draw(number, changed, form), _kind(first), names, axes, cache)


_CONTINUABLE = frozenset({"input_ids", "decoder_input_ids"})


def _caches(config: Any) -> bool:
    # An encoder that may be a decoder too has the argument, but no cache.
    decodes = getattr(config, "is_decoder", None)
    return inputs.field_of(config, "use_cache") is not None and (decodes is not False or config.is_encoder_decoder)


def _accepted(model: Any, names: frozenset[str], case: Case, config: Any) -> Callable[[inputs.Draw], inputs.Inputs]:
    def fresh() -> inputs.Draw:
        return inputs.Draw(config, names, case, case.length, _ROWS, seed=0)

    errors = []
    for form in inputs.candidates(model, fresh):
        try:
            with torch.no_grad():
                model(**form(fresh()))
            return form
        except Exception as error:
            errors.append(_line(error))
    said = " | ".join(dict.fromkeys((*errors[:1], *errors[-1:])))
    raise NotBuiltError(f"eager PyTorch accepts none of the inputs: {said}" if errors else "unknown inputs")


def _kind(first: inputs.Inputs) -> str:
    if "pixel_values" in first:
        return "vision"
    if {"input_values", "input_features", "audio_values"}.intersection(first):
        return "audio"
    return "text" if "input_ids" in first else "other"


def _timm(architecture: Architecture, case: Case) -> Subject:
    catalog.replace_torchvision()
    import timm

    model = timm.create_model(architecture.name, pretrained=False).eval()
    return _classifier(model, model.default_cfg.get("input_size", (3, 224, 224)))


def _torchvision(architecture: Architecture, case: Case) -> Subject:
    from torchvision import models

    model = models.get_model(architecture.name, weights=None, weights_backbone=None).eval()
    return _classifier(model, (3, 224, 224))


def _classifier(model: torch.nn.Module, size: tuple[int, ...]) -> Subject:
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MOST_PARAMETERS:
        raise NotBuiltError(f"too large: {count / 1e6:.0f} million parameters")
    weights.draw(model)

    def draw(number: int, changed: bool) -> inputs.Inputs:
        generator = torch.Generator().manual_seed(number)
        return {"x": torch.randn(_ROWS + changed, *size, generator=generator)}

    return Subject(model, draw, "vision", frozenset({"x"}))


_BUILDERS: dict[str, Callable[[Architecture, Case], Subject]] = {
    "transformers": _transformers,
    "timm": _timm,
    "torchvision": _torchvision,
}
