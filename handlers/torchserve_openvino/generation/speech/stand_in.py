"""A Whisper model whose ``generate`` is transformers' own, and computes in the compiled pieces.

This module imports transformers; it is imported where a model is loaded.
"""

import copy
from typing import Any

from torch import Tensor
from transformers import WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from torchserve_openvino.generation.speech.whisper_decoder import Memory, WhisperDecoder


class _GeneratingEncoder:
    """What ``generate`` calls in the encoder's place.

    Args:
        pieces: The pieces.
    """

    def __init__(self, pieces: WhisperDecoder) -> None:
        self._pieces = pieces

    def forward(self, input_features: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutput:
        """Encodes spectrograms; Whisper does not read the mask."""
        return BaseModelOutput(last_hidden_state=self._pieces.encode(input_features))

    def __call__(self, input_features: Tensor, **ignored: Any) -> BaseModelOutput:
        """As `forward`."""
        return self.forward(input_features)


class CompiledWhisper(WhisperForConditionalGeneration):
    """Is made by `stand_in`; shares weights and settings with the model that it stands for."""

    _pieces: WhisperDecoder

    def get_encoder(self, modality: str | None = None) -> Any:
        """Returns what encodes."""
        return _GeneratingEncoder(self._pieces)

    def forward(
        self,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Any = None,
        decoder_position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> Any:
        """Runs the decoder on new tokens, as the model's own ``forward`` does.

        Raises:
            ValueError: It is called for what the compiled pieces do not compute.
        """
        if decoder_input_ids is None or output_attentions or output_hidden_states:
            raise ValueError("a compiled Whisper model takes decoder_input_ids, and returns logits only")
        pieces = self._pieces
        memory = cache if isinstance(cache, Memory) else None
        if memory is None:
            # Until the first call, `cache` is transformers' own, and empty.
            states = encoder_outputs[0] if encoder_outputs is not None else pieces.encode(_given(input_features))
            memory = pieces.memory(states)
        logits = pieces.decode(decoder_input_ids, memory, decoder_position_ids, decoder_attention_mask)
        return Seq2SeqLMOutput(logits=logits, cache=memory if use_cache is not False else None)


def _given(features: Tensor | None) -> Tensor:
    if features is None:
        raise ValueError("neither input_features nor encoder_outputs are given")
    return features


def stand_in(model: WhisperForConditionalGeneration, pieces: WhisperDecoder) -> CompiledWhisper:
    """Returns a model that looks like ``model``, whose weights it shares, and computes in its pieces.

    Args:
        model: A Whisper model; stays as it is.
        pieces: Its pieces.
    """
    copied: Any = copy.copy(model)
    copied.__class__ = CompiledWhisper
    copied._pieces = pieces
    return copied
