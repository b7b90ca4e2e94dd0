"""The base of the audio tasks: feature extractor, lengths, and the way from recordings through the model and back."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import nn

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.errors import InvalidInputError, ItemError, ModelLoadError
from torchserve_openvino.serving.loading import hub
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.tasks.audio.sound import SECTION, RecordingLimits, samples_of
from torchserve_openvino.tasks.hub_handler import HubHandler, RequestInput
from torchserve_openvino.tasks.request_body import RequestBody
from torchserve_openvino.tasks.text.text_handler import doublings

# --- what all audio tasks have in common: how a request brings a recording ----------------------------------------


# Most recordings in one request.
MAX_INPUTS = 16
# How a body begins that is JSON; no audio file begins like this.
_JSON = (b"{", b"[")


class RecordingHandler(HubHandler):
    """A task whose inputs are recordings: a file as body, or JSON with base64."""

    # libsndfile, soxr and NumPy release the interpreter's lock for most of their work.
    decodes_in_parallel = True
    size_key = "handler.openvino.audio.max_bytes"
    takes = Annotated[str, Field(description="A recording: base64, or a data: URL.")]

    def limits(self) -> tuple[int, int]:
        """Returns the largest JSON body in bytes, for recordings of ``max_bytes`` in base64, and the most inputs."""
        return self._openvino.config.openvino.audio.max_bytes * 4 // 3 + 4096, MAX_INPUTS

    def ask(self, value: Any, max_bytes: int, max_inputs: int) -> RequestBody:
        """Reads what one request asks: a body that is not JSON is a recording as it is, never text."""
        if isinstance(value, (bytes, bytearray)) and not value[:64].lstrip().startswith(_JSON):
            return RequestBody([bytes(value)], {}, many=False)
        return super().ask(value, max_bytes, max_inputs)


# --- the base of the audio tasks: feature extractor, lengths, and the way from recordings through the model and back


LENGTH = "samples"
FEATURES, MASK = "input_values", "attention_mask"
# The longest recording where the YAML does not say; docs/configuration.md states it.
_MAX_SECONDS = 30.0
# The shortest recording where features have a fixed shape: one window of the usual spectrograms.
_WINDOW_SECONDS = 0.025


class AudioHead(nn.Module):
    """A Hugging Face model that returns only its logits.

    Args:
        model: The model.
        masks: Whether it is called with padded recordings and their mask.
    """

    def __init__(self, model: nn.Module, *, masks: bool) -> None:
        super().__init__()
        self._stacks = masks and mask_group_norm(model)
        self.model = model
        self._takes = str(model.main_input_name)
        self.train(model.training)

    def forward(self, input_values: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Runs the model on samples ``[batch, samples]`` or on features of a fixed shape."""
        if attention_mask is None:
            return self.logits(self.model(**{self._takes: input_values}).logits, None)
        values = input_values
        if self._stacks:
            values = torch.stack([values, attention_mask.to(values.dtype)], dim=1)
        return self.logits(self.model(**{self._takes: values, MASK: attention_mask}).logits, attention_mask)

    def logits(self, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Returns what the task reads of the model's logits."""
        return scores


@dataclass(frozen=True)
class Recording:
    """One recording.

    Attributes:
        part: The input and its parameters.
        features: What the feature extractor makes of it, ``[1, samples]`` or of a fixed shape.
        samples: Its length at the model's rate.
    """

    part: RequestInput
    features: torch.Tensor
    samples: int

    def __len__(self) -> int:
        return self.samples


class AudioHandler(RecordingHandler):
    """An audio task: `answer` reads the model's logits.

    The answer is always that to the recording alone. Models are of two kinds, told apart by what their feature
    extractor makes of recordings:

    - Samples as they are: a recording is padded to the next compiled length, and a mask hides the padding, whether or
      not the model was trained with one: alone, each sample of a recording counts in both cases. A group norm over
      time, which no mask of transformers reaches, is masked here (`MaskedEncoder`). A model whose answer changes with
      the padding nevertheless is refused before READY (`serving/shapes/probe.py`): with an adapter, with several
      convolutions for positions (Data2VecAudio), or with frames that are joined in pairs (SEW).
      With ``batching.mode: dynamic`` there is no padding and no mask, one graph of symbolic sizes, and only recordings
      of the same length share a call. It is no default, because torch chooses kernels of convolutions by size while it
      traces: a length beyond such a limit is compiled after READY.
    - Features of a fixed shape, as spectrograms are: the feature extractor pads, and cuts, as the model was trained.

    Attributes:
        extractor: The model's feature extractor.
        rate: The model's sampling rate in Hz.
        allowed: The largest recording.
        shortest: The shortest recording in samples.
        fixed: Shape of the features where it is fixed, else None.
        masks: Whether recordings are padded, and the model gets a mask.
    """

    head: ClassVar[type[AudioHead]] = AudioHead

    def __init__(self) -> None:
        super().__init__()
        self.extractor: Any = None
        self.rate = 0
        self.allowed = RecordingLimits(0.0, 0)
        self.shortest = 1
        self.fixed: tuple[int, ...] | None = None
        self.masks = False
        self.dtype = torch.float32

    # --- loading ----------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> nn.Module:
        """Loads model and feature extractor, and completes the configuration with the compiled lengths."""
        model: Any = super().load(folder)
        self.extractor = hub.load_feature_extractor(folder)
        self.rate = int(self.extractor.sampling_rate)
        # A quantized model has no weights here, and takes float32.
        self.dtype = next((weight.dtype for weight in model.parameters()), torch.float32)
        self.fixed = self._fixed_shape()
        self.shortest = self._shortest(model.config)
        self._openvino.config = self._with_lengths(self._openvino.config)
        return model

    def servable(self, model: Any) -> Any:
        """Returns the model inside the task's head."""
        return self.head(model, masks=self.masks)

    def _fixed_shape(self) -> tuple[int, ...] | None:
        """Returns the shape of the features if all recordings have the same; None if it is that of the samples."""
        noise = np.random.default_rng(0).standard_normal(2 * self.rate).astype(np.float32) * 0.1
        short, long = (tuple(self._extracted(noise[:n]).shape[1:]) for n in (self.rate, 2 * self.rate))
        if short == long:
            return short
        if (short, long) == ((self.rate,), (2 * self.rate,)):
            return None
        raise ModelLoadError(
            f"{type(self.extractor).__name__} makes features {list(short)} of one second and {list(long)} of two; "
            "supported are samples as they are, and features of a fixed shape."
        )

    def _shortest(self, config: Any) -> int:
        """Returns the samples that the model needs for one frame."""
        if self.fixed is not None:
            return math.ceil(_WINDOW_SECONDS * self.rate)
        samples = 1
        layers = zip(config.conv_kernel, config.conv_stride, strict=True)
        for kernel, stride in reversed(list(layers)):
            samples = (samples - 1) * int(stride) + int(kernel)
        return samples

    def _with_lengths(self, config: ServingConfig) -> ServingConfig:
        section = config.openvino
        audio, batching = section.audio, section.batching
        if section.warmup.inputs or batching.dims:
            raise ModelLoadError(
                "handler.openvino.warmup.inputs and batching.dims are for models without a feature extractor of ours; "
                f"this handler knows its inputs: set {SECTION}.lengths instead."
            )
        longest = audio.max_seconds if audio.max_seconds is not None else _MAX_SECONDS
        seconds = (
            [float(length) for length in audio.lengths]
            if audio.lengths != "auto"
            else [*doublings(1.0, longest), longest]
        )
        if seconds[-1] > longest:
            raise ModelLoadError(
                f"{SECTION}.lengths has {seconds[-1]:g} s; the longest recording has {longest:g} s (audio.max_seconds)."
            )
        key = "lengths" if seconds[-1] < longest else "max_seconds"
        self.allowed = RecordingLimits(seconds[-1], audio.max_bytes, f"{SECTION}.{key}")
        lengths = [math.ceil(length * self.rate) for length in seconds]
        if self.shortest > lengths[-1]:
            raise ModelLoadError(
                f"{self.allowed.key} is {seconds[-1]:g} s, which is less than the {self.shortest} samples that this "
                "model needs."
            )
        if batching.mode == "dynamic":
            lengths = [self.shortest, lengths[-1]]
        self.masks = self.fixed is None and batching.mode == "bucket"
        dims = {} if self.fixed is not None else {LENGTH: sorted({n for n in lengths if n >= self.shortest})}
        changed = batching.model_copy(update={"dims": dims})
        return config.model_copy(update={"openvino": section.model_copy(update={"batching": changed})})

    def warmup_inputs(self) -> Sequence[WarmupInput]:
        """Returns the features, and their mask where the model gets one."""
        shape: list[int | str] = list(self.fixed) if self.fixed is not None else [LENGTH]
        pad = float(getattr(self.extractor, "padding_value", 0.0))
        kind = str(self.dtype).removeprefix("torch.")
        features = WarmupInput(name=FEATURES, shape=shape, dtype=kind, pad=pad)
        mask = WarmupInput(name=MASK, shape=[LENGTH], dtype="int64", mask=True)
        return [features, mask] if self.masks else [features]

    def sample_inputs(self, body: bytes) -> Inputs:
        """Returns the model's inputs for one request's body."""
        recordings = [self.decode(part) for part in self.parts_of(body)]
        if self.fixed is None and not self.masks and len({len(recording) for recording in recordings}) > 1:
            raise InvalidInputError("this model takes recordings of one length together, because nothing is padded")
        return (), self._batch(recordings)

    # --- requests ---------------------------------------------------------------------------------------------

    def decode(self, item: RequestInput) -> Recording:
        """Decodes one recording, and extracts its features."""
        samples = samples_of(item.input, self.rate, self.allowed)
        if len(samples) < self.shortest:
            raise InvalidInputError(
                f"the recording has {len(samples)} samples at {self.rate} Hz; this model needs {self.shortest}"
            )
        return Recording(item, self._extracted(samples), len(samples))

    def _extracted(self, samples: np.ndarray) -> torch.Tensor:
        features = self.extractor(samples, sampling_rate=self.rate, return_tensors="pt")
        return features[self.extractor.model_input_names[0]].to(self.dtype)

    @abstractmethod
    def answer(self, recording: Recording, logits: torch.Tensor) -> Any:
        """Returns the answer to one recording.

        Args:
            recording: The recording.
            logits: The head's output for it; of frames, also those of the padding.

        Raises:
            ItemError: There is no answer.
        """

    def predict(self, values: list[Recording]) -> list[Any]:
        """Runs all recordings, and answers each."""
        answers: list[Any] = [None] * len(values)
        for position, logits in self._run(values).items():
            try:
                self.check_finite([logits])
                answers[position] = self.answer(values[position], logits)
            except ItemError as error:
                answers[position] = error
        return answers

    def _run(self, values: Sequence[Recording]) -> Mapping[int, torch.Tensor]:
        logits_by_position: dict[int, torch.Tensor] = {}
        with torch.inference_mode():
            for group in self._groups(values):
                logits = self.model(**self._batch([values[position] for position in group]))
                logits_by_position |= zip(group, logits, strict=True)
        return logits_by_position

    def _groups(self, values: Sequence[Recording]) -> list[list[int]]:
        if self.fixed is not None:
            return self.groups(values, [math.ceil(self.allowed.seconds * self.rate)])
        if self.masks or not self.joins:
            return self.groups(values, self._openvino.config.openvino.batching.dims[LENGTH])
        # Nothing may be padded.
        alike: dict[int, list[int]] = {}
        for position, value in enumerate(values):
            alike.setdefault(len(value), []).append(position)
        return list(alike.values())

    def _batch(self, values: Sequence[Recording]) -> dict[str, torch.Tensor]:
        """Returns the head's inputs for recordings that share a call, padded on the right to the longest."""
        if not self.masks:
            return {FEATURES: torch.cat([value.features for value in values])}
        longest = max(map(len, values))
        fill = float(getattr(self.extractor, "padding_value", 0.0))
        rows = [nn.functional.pad(value.features, (0, longest - len(value)), value=fill) for value in values]
        lengths = torch.tensor([[len(value)] for value in values])
        return {FEATURES: torch.cat(rows), MASK: (torch.arange(longest) < lengths).to(torch.int64)}

    def run_eager(self, value: Recording) -> Any:
        """Runs the eager model on one recording."""
        return self._openvino.eager_model(**self._batch([value]))


# --- makes a model's answer to a padded recording that to the recording alone, where a mask alone does not --------


class MaskedEncoder(nn.Module):
    """A wav2vec 2.0 feature encoder whose group norm does not see the padding.

    The first layer of these encoders (``feat_extract_norm: group``) normalizes each channel over time, so that zeros
    behind a recording change all its frames. Here the mean and the variance are those of the recording's own frames.
    The layers after it are convolutions without padding, whose frames depend on samples of the recording only.

    Models pass nothing but samples to their encoder: the mask comes as a second channel.

    Args:
        encoder: The model's encoder.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.train(encoder.training)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Maps samples and mask ``[batch, 2, samples]`` to features ``[batch, channels, frames]``."""
        first, *others = self.encoder.conv_layers
        hidden = first.conv(values[:, :1])
        samples = values[:, 1].to(torch.int64).sum(-1)
        frames = torch.div(samples - first.conv.kernel_size[0], first.conv.stride[0], rounding_mode="floor") + 1
        hidden = first.activation(_normalized(hidden, frames, first.layer_norm))
        for layer in others:
            hidden = layer(hidden)
        return hidden


def _normalized(hidden: torch.Tensor, frames: torch.Tensor, norm: nn.GroupNorm) -> torch.Tensor:
    """Applies a group norm of one channel in each group to the first frames of each row."""
    real = (torch.arange(hidden.shape[-1], device=hidden.device) < frames[:, None])[:, None]
    count = frames.clamp(min=1)[:, None, None].to(hidden.dtype)
    mean = torch.where(real, hidden, 0.0).sum(-1, keepdim=True) / count
    centered = torch.where(real, hidden - mean, 0.0)
    variance = centered.square().sum(-1, keepdim=True) / count
    return centered * torch.rsqrt(variance + norm.eps) * norm.weight[:, None] + norm.bias[:, None]


def mask_group_norm(model: Any) -> bool:
    """Replaces a model's feature encoder by a `MaskedEncoder` if its first layer has a group norm over time.

    Returns:
        Whether it did, and the model takes ``[batch, 2, samples]`` now.
    """
    encoder = getattr(model.base_model, "feature_extractor", None)
    layers = getattr(encoder, "conv_layers", None)
    norm = getattr(layers[0], "layer_norm", None) if layers else None
    if not isinstance(norm, nn.GroupNorm) or norm.num_groups != norm.num_channels:
        return False
    model.base_model.feature_extractor = MaskedEncoder(encoder)
    return True
