"""Writes down what is said in a recording, with models that name a character for each frame (CTC), or with Whisper."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchserve_openvino.errors import InvalidInputError, ModelLoadError, NonFiniteOutputError
from torchserve_openvino.serving.loading import hub
from torchserve_openvino.serving.verification.measures import Measure, Top1
from torchserve_openvino.tasks.audio.audio_handler import LENGTH, AudioHandler, AudioHead, Recording
from torchserve_openvino.tasks.catalog import encodes
from torchserve_openvino.tasks.hub_handler import RequestInput
from torchserve_openvino.tasks.speech.speech_parameters import SpeechParameters, Spoken
from torchserve_openvino.tasks.speech.transcriber import Transcriber


class FramesHead(AudioHead):
    """A CTC model whose answer to a padded recording is that to the recording alone, followed by zeros.

    The number of frames is a function of the number of samples that only the model knows, so its output can't be cut
    to a length in samples. All compiled lengths return the frames of the longest one instead, and those of the padding
    are zero.

    Args:
        model: The model.
        masks: Whether it is called with padded recordings and their mask.
        longest: The longest recording in samples.
    """

    def __init__(self, model: nn.Module, *, masks: bool, longest: int) -> None:
        super().__init__(model, masks=masks)
        self._most = frames_of(model, longest)

    def logits(self, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Returns the logits, ``[batch, frames of the longest recording, characters]``."""
        if mask is None:
            return scores
        model: Any = self.model
        frames = model._get_feat_extract_output_lengths(mask.sum(-1))
        padding = torch.arange(scores.shape[1], device=scores.device)[None, :] >= frames[:, None]
        return nn.functional.pad(scores.masked_fill(padding[..., None], 0.0), (0, 0, 0, self._most - scores.shape[1]))


class SpeechRecognizer(AudioHandler):
    """The text of a recording: the best character of each frame, joined by the model's tokenizer.

    A handler for a model that writes token by token becomes a `Transcriber` before it loads anything.
    A language model in the folder (`Wav2Vec2ProcessorWithLM`) is not used.

    Attributes:
        tokenizer: The model's tokenizer.
    """

    task = "speech_recognizer"
    parameters = SpeechParameters
    answers = Spoken

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: Any = None

    def read_archive(self) -> None:
        """Loads the model; of one that writes token by token, as a `Transcriber`."""
        if not encodes(hub.read_config(hub.hub_folder(self._openvino.model_dir))):
            super().read_archive()
            return
        # TorchServe keeps this object's `handle`, so that it stays the same object, as with `handler.openvino.wrap`.
        handler: Any = self
        handler.__class__ = Transcriber
        Transcriber.read_archive(handler)

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet: the text is made of each frame's best character."""
        return Top1()

    def load(self, folder: Path) -> nn.Module:
        """Loads model, feature extractor and tokenizer."""
        model: Any = super().load(folder)
        if self.fixed is not None or not hasattr(model, "_get_feat_extract_output_lengths"):
            raise ModelLoadError(f"{type(model).__name__} does not take samples, as the CTC models served here do.")
        self.tokenizer = hub.load_tokenizer(folder, fast=False)
        return model

    def servable(self, model: Any) -> Any:
        """Returns the model inside its head."""
        return FramesHead(model, masks=self.masks, longest=self._openvino.config.openvino.batching.dims[LENGTH][-1])

    def decode(self, item: RequestInput) -> Recording:
        """Decodes one recording."""
        if names := sorted(item.parameters.model_fields_set):
            raise InvalidInputError(
                f"{names[0]} is for models that write text token by token (Whisper); this one is for CTC, and takes no "
                "parameters"
            )
        return super().decode(item)

    def answer(self, recording: Recording, logits: torch.Tensor) -> dict[str, str]:
        """Returns ``{"text": ...}``."""
        spoken = logits[: frames_of(self._openvino.eager_model.model, len(recording))]
        if bool(spoken.isnan().any()):
            raise NonFiniteOutputError("the model's scores are not numbers for this recording")
        # As in transformers' pipeline, which keeps special tokens in a CTC model's text.
        return {"text": self.tokenizer.decode(spoken.argmax(dim=-1).tolist(), skip_special_tokens=False)}


def frames_of(model: Any, samples: int) -> int:
    """Returns how many frames a CTC model makes of a recording."""
    return int(model._get_feat_extract_output_lengths(torch.tensor(samples)))
