"""Inputs of a model, by the names in the signature of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from model_zoo.grid import Case
from model_zoo.overrides import INPUTS
from model_zoo.shrinking import FIRST_TOKEN, PATCHES_PER_SIDE, VOCABULARY, patch_of

Inputs = dict[str, Any]
# Samples of a recording for one frame of a model that reads samples.
_SAMPLES_PER_FRAME = 320
_PATCHES = frozenset({"hidden_states", "pixel_values"})


@dataclass
class Draw:
    """Draws the inputs of one call.

    Attributes:
        config: Configuration of the small model.
        names: Names of the arguments of its forward.
        case: The case.
        length: Tokens, in place of the case's.
        rows: Rows of the batch.
        seed: Other values with another seed.
    """

    config: Any
    names: frozenset[str]
    case: Case
    length: int
    rows: int
    seed: int

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def floats(self, *sizes: int) -> torch.Tensor:
        """Normal values."""
        return torch.randn(*sizes, generator=self.generator)

    def tokens(self, length: int, limit: int | None = None) -> torch.Tensor:
        """Token ids without special tokens: int64 ``[rows, length]``."""
        limit = limit or min(VOCABULARY, self.size("vocab_size", VOCABULARY))
        first = FIRST_TOKEN if limit > 2 * FIRST_TOKEN else 3
        return torch.randint(first, limit, (self.rows, length), generator=self.generator)

    def size(self, name: str, default: int = 0) -> int:
        """The value of a field, in the configuration or the first of its parts that has it."""
        value = field_of(self.config, name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value else default

    def text(self) -> Inputs:
        """Token ids, the second row padded on the case's side, with a mask where the model takes one."""
        ids = self.tokens(self.length)
        return self.masked("input_ids", ids) if "attention_mask" in self.names else {"input_ids": ids}

    def masked(self, name: str, values: torch.Tensor, mask_name: str = "attention_mask") -> Inputs:
        """Pads the second row of ``[rows, length]`` or ``[rows, length, features]``, and adds the mask."""
        length = values.shape[1]
        padding, mask = length // 3, torch.ones(values.shape[:2], dtype=torch.int64)
        padded = slice(0, padding) if self.case.padding == "left" else slice(length - padding, length)
        mask[1, padded] = 0
        values[1, padded] = 0
        return {name: values, mask_name: mask}

    def boxes(self) -> torch.Tensor:
        """Boxes of words: int64 ``[rows, length, 4]``."""
        corners = torch.randint(0, 500, (self.rows, self.length, 2), generator=self.generator)
        return torch.cat([corners, corners + 100], 2)

    def grids(self) -> torch.Tensor:
        """Time, height and width of each picture in patches: int64 ``[rows, 3]``."""
        side = PATCHES_PER_SIDE[self.case.length]
        return torch.tensor([[1, side, side]] * self.rows)

    def patches(self) -> torch.Tensor:
        """All pictures as one list of flattened patches."""
        patch = patch_of(vars(self.config))
        size = self.size("num_channels", self.size("in_channels", 3)) * patch**2 * self.size("temporal_patch_size", 1)
        return self.floats(int(self.grids().prod(1).sum()), size)

    def picture(self, frames: int = 0) -> Inputs:
        """Pixels ``[rows, channels, height, width]``, or ``[rows, frames, channels, height, width]``."""
        height, width = self.sides()
        shape = (self.size("num_channels", 3), height, width)
        return {"pixel_values": self.floats(self.rows, *((frames,) if frames else ()), *shape)}

    def sides(self) -> tuple[int, int]:
        """Height and width of pictures."""
        size = next((v for n in ("image_size", "img_size", "input_size") if (v := field_of(self.config, n))), 0)
        if isinstance(size, list | tuple):
            return size[0], size[-1]
        side = size if isinstance(size, int) and size else {1: 64, 33: 96, 64: 128, 257: 256}[self.case.length]
        return side, side

    def samples(self) -> torch.Tensor:
        """Samples of a recording: ``[rows, samples]``."""
        return self.floats(self.rows, _SAMPLES_PER_FRAME * max(self.length, 8) + 80)


def field_of(config: Any, name: str) -> Any:
    """Returns a field's value, searched in the parts of a composite configuration too; None if no part has it."""
    value = getattr(config, name, None)
    if value is not None:
        return value
    for part in vars(config).values():
        if hasattr(part, "to_dict") and (value := field_of(part, name)) is not None:
            return value
    return None


def candidates(model: Any, draw: Callable[[], Draw]) -> Iterator[Callable[[Draw], Inputs]]:
    """Yields functions that draw inputs, the likeliest first; the first that eager PyTorch accepts is used.

    Args:
        model: The model.
        draw: Makes a `Draw`, for the names of the arguments.
    """
    if override := INPUTS.get(model.config.model_type):
        yield override
        return
    names = draw().names
    decoder = _decoder if "decoder_input_ids" in names and model.config.is_encoder_decoder else _nothing
    both = "input_ids" in names and "pixel_values" in names
    if "grid_thw" in names:
        main = model.main_input_name if model.main_input_name in names else next(iter(names & _PATCHES))
        yield lambda d: {main: d.patches(), "grid_thw": d.grids()}
    if "bbox" in names:
        yield lambda d: {**d.text(), "bbox": d.boxes(), **decoder(d)}
    if "input_ids" in names:
        yield lambda d: {**d.text(), **decoder(d)}
    if "pixel_values" in names:
        yield lambda d: {**d.picture(), **decoder(d)}
        if both:
            yield lambda d: {**d.text(), **d.picture(), **decoder(d)}
        yield lambda d: {**d.picture(d.size("num_frames", 4)), **decoder(d)}
        if both:
            yield lambda d: {**d.text(), **d.picture(d.size("num_frames", 4)), **decoder(d)}
    if "pixel_values_videos" in names:
        yield lambda d: {"pixel_values_videos": d.picture(d.size("frames_per_clip", 4))["pixel_values"]}
    for name in ("input_values", "audio_values", "input_features"):
        if name in names:
            for form in _AUDIO:
                if "input_features_mask" in names:
                    yield lambda d, name=name, form=form: {**d.masked(name, form(d), "input_features_mask")}
                if "attention_mask" in names:
                    yield lambda d, name=name, form=form: {**d.masked(name, form(d)), **decoder(d)}
                yield lambda d, name=name, form=form: {name: form(d), **decoder(d)}
                if "input_ids" in names:
                    yield lambda d, name=name, form=form: {**d.text(), name: form(d)}
    if "hidden_states" in names or "inputs_embeds" in names:
        name = "hidden_states" if "hidden_states" in names else "inputs_embeds"
        yield lambda d: {name: d.floats(d.rows, d.length, d.size("hidden_size", 256))}


def _nothing(draw: Draw) -> Inputs:
    return {}


def _decoder(draw: Draw) -> Inputs:
    return {"decoder_input_ids": draw.tokens(min(draw.length, 16))}


def _mel(draw: Draw) -> int:
    return draw.size("num_mel_bins") or draw.size("input_feat_per_channel") or draw.size("feature_size", 80)


_AUDIO: tuple[Callable[[Draw], torch.Tensor], ...] = (
    lambda d: d.samples(),
    lambda d: d.samples()[:, None],
    # Whisper takes exactly twice its positions.
    lambda d: d.floats(d.rows, _mel(d), 2 * d.size("max_source_positions", max(d.length, 4))),
    lambda d: d.floats(d.rows, max(4, 2 * d.length), _mel(d)),
    lambda d: d.floats(d.rows, d.size("max_length", 2 * d.length), _mel(d)),
    lambda d: d.floats(d.rows, max(d.length, 4), d.size("feature_projection_input_dim", d.size("input_dim", 80))),
    lambda d: d.floats(d.rows, 1, d.size("spec_size", 256), d.size("num_mel_bins", 64)),
)


def forward_names(model: torch.nn.Module) -> frozenset[str]:
    """Names of the arguments of a model's forward."""
    return frozenset(inspect.signature(model.forward).parameters)
