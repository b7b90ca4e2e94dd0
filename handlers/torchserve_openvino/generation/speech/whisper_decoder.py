"""The loop around the graphs of a Whisper model: rows in compiled batches, and a cache of fixed size between steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchserve_openvino.backend.runtime.compare import is_finite
from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.errors import NonFiniteOutputError
from torchserve_openvino.generation.graph_calls import GraphCalls, SizedGraph
from torchserve_openvino.generation.speech.whisper_graphs import SoundGraph, WhisperDecoderGraph, WhisperEncoderGraph

# New tokens of one call of the decoder: one, or up to this many where there are several, as at the beginning. Whisper
# begins with two to four; only prompts are longer, and take several calls.
WIDTH = 8
# Hides a token; the least number that does not become infinite when a score is added.
_HIDDEN = float(torch.finfo(torch.float32).min) / 2


@dataclass
class _SharedRows:
    """The rows that share calls of the decoder.

    Attributes:
        count: How many there are; the rest up to the compiled batch are copies of the last.
        own: Keys and values of tokens, for each layer in turn.
        sound: Keys and values of sound, for each layer in turn.
    """

    count: int
    own: list[Tensor]
    sound: list[Tensor]

    @property
    def past(self) -> list[Tensor]:
        """What the decoder's graph takes."""
        pairs = zip(_pairs(self.own), _pairs(self.sound), strict=True)
        return [tensor for own, sound in pairs for tensor in (*own, *sound)]


class Memory:
    """Keys and values of a text that is being written; takes the place of transformers' cache.

    Args:
        parts: The rows, by calls of the decoder.

    Attributes:
        length: Tokens that it holds.
    """

    # transformers asks; it would compile the model itself then.
    is_compileable = False

    def __init__(self, parts: list[_SharedRows]) -> None:
        self.parts = parts
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns how many tokens it holds."""
        return self.length

    def reorder_cache(self, beams: Tensor) -> None:
        """Replaces each row by the row that ``beams`` names, as a search with several beams does.

        Beams of a recording follow each other and hear the same sound, which therefore stays where it is.
        """
        columns = zip(*(part.own for part in self.parts), strict=True)
        counts = [part.count for part in self.parts]
        for number, column in enumerate(columns):
            rows = torch.cat([tensor[:count] for tensor, count in zip(column, counts, strict=True)])[beams]
            for part, own in zip(self.parts, rows.split(counts), strict=True):
                part.own[number][: part.count] = own


class WhisperDecoder:
    """A Whisper model in pieces: encoder, keys and values of sound, decoder.

    Args:
        model: A `WhisperForConditionalGeneration` in float32.
        batches: Batch sizes that the pieces are compiled for, ascending. Other numbers of rows are split and padded.
    """

    def __init__(self, model: Any, batches: Sequence[int]) -> None:
        self._config = model.config
        self.batches = tuple(batches)
        self.encoder, self.sound = GraphCalls(WhisperEncoderGraph(model)), GraphCalls(SoundGraph(model))
        self.decoder = GraphCalls(WhisperDecoderGraph(model))
        self.length = int(self._config.max_target_positions)
        self._heard: tuple[Tensor, Tensor] | None = None

    def parts(self) -> Iterator[SizedGraph]:
        """Yields what to compile."""
        config = self._config
        heads = int(config.decoder_attention_heads)
        size, positions = int(config.d_model) // heads, int(config.max_source_positions)
        features: list[int | str] = [int(config.num_mel_bins), 2 * positions]
        yield SizedGraph("encoder", self.encoder, [WarmupInput(name="features", shape=features)], self.batches)
        states = WarmupInput(name="states", shape=[positions, int(config.d_model)])
        yield SizedGraph("sound", self.sound, [states], self.batches)
        own, sound = WarmupInput(shape=[heads, self.length, size]), WarmupInput(shape=[heads, positions, size])
        past = [own, own, sound, sound] * int(config.decoder_layers)
        for width in (1, WIDTH):
            ids = WarmupInput(shape=[width], dtype="int64", low=0, high=int(config.vocab_size))
            places = WarmupInput(shape=[width], dtype="int64", low=0, high=self.length)
            mask = WarmupInput(shape=[1, width, self.length + width])
            yield SizedGraph(f"decoder {width}", self.decoder, [ids, places, mask, *past], self.batches)

    def encode(self, features: Tensor) -> Tensor:
        """Maps spectrograms ``[rows, mel bins, frames]`` to states ``[rows, positions, width]``.

        The last result is kept: transformers encodes a window twice to find its language.
        """
        # Read once: requests may come in several threads.
        heard = self._heard
        if heard is not None and torch.equal(heard[0], features):
            return heard[1]
        split = self._split(len(features))
        blocks = [self.encoder(features=_rows(features, *block))[: block[1]] for block in split]
        states = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        self._heard = features, states
        return states

    def forget(self) -> None:
        """Frees what `encode` keeps."""
        self._heard = None

    def memory(self, states: Tensor) -> Memory:
        """Returns an empty memory for texts about the sound of these states."""
        heads = int(self._config.decoder_attention_heads)
        shape = (heads, self.length, int(self._config.d_model) // heads)
        parts = []
        for start, count, size in self._split(len(states)):
            sound = self.sound(states=_rows(states, start, count, size))
            parts.append(_SharedRows(count, [torch.zeros(size, *shape) for _ in sound], list(sound)))
        return Memory(parts)

    def decode(
        self, ids: Tensor, memory: Memory, positions: Tensor | None = None, shown: Tensor | None = None
    ) -> Tensor:
        """Runs the decoder on new tokens, and adds them to the memory.

        Args:
            ids: int64 ``[rows, new]``.
            memory: What came before.
            positions: int64 ``[rows, new]``; None counts on.
            shown: ``[rows, tokens in memory and new]``: false or 0 hides a token; None shows all.

        Returns:
            Logits ``[rows, new, vocabulary]``.

        Raises:
            ValueError: The memory has no room for so many tokens.
            NonFiniteOutputError: The logits hold NaN or infinity.
        """
        rows, new = ids.shape
        if memory.length + new > self.length:
            raise ValueError(f"{memory.length + new} tokens do not fit; this model has {self.length} positions")
        if positions is None:
            positions = (torch.arange(new) + memory.length).expand(rows, new)
        blocks = []
        for start in range(0, new, WIDTH):
            some = slice(start, min(start + WIDTH, new))
            until = None if shown is None else shown[:, : memory.length + some.stop - some.start]
            blocks.append(self._step(ids[:, some], positions[:, some], memory, until))
        logits = torch.cat(blocks, dim=1) if len(blocks) > 1 else blocks[0]
        if not is_finite(logits):
            raise NonFiniteOutputError("the model's scores are not numbers for this recording")
        return logits

    def _step(self, ids: Tensor, positions: Tensor, memory: Memory, shown: Tensor | None) -> Tensor:
        """Runs the decoder once: on one token, or on up to `WIDTH`."""
        rows, new = ids.shape
        width = 1 if new == 1 else WIDTH
        mask = self._mask(rows, new, width, memory.length, shown)
        if width > new:
            ids, positions = (
                torch.cat([x, x[:, -1:].expand(rows, width - new)], dim=1) for x in (ids, positions)
            )  # fmt: skip
        blocks, start = [], 0
        for part in memory.parts:
            size = len(part.own[0])
            inputs = (_rows(tensor, start, part.count, size) for tensor in (ids, positions, mask))
            logits, *memories = self.decoder(*inputs, *part.past)
            for own, added in zip(part.own, memories, strict=True):
                own[:, :, memory.length : memory.length + new] = added[:, :, :new]
            blocks.append(logits[: part.count, :new])
            start += part.count
        memory.length += new
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0]

    def _mask(self, rows: int, new: int, width: int, past: int, shown: Tensor | None) -> Tensor:
        """Returns what is added to scores, ``[rows, 1, width, length + width]``."""
        seen = torch.zeros(rows, width, self.length + width, dtype=torch.bool)
        # A new token sees those before it, and itself; what fills up the width is seen by no token but itself.
        seen[:, :, self.length :] = torch.ones(width, width, dtype=torch.bool).tril()
        seen[:, :, :past] = True
        if shown is not None:
            seen[:, :, :past] &= shown[:, None, :past].bool()
            seen[:, :, self.length : self.length + new] &= shown[:, None, past:].bool()
            # A hidden token still sees itself: a row of hidden tokens alone has no softmax.
            seen[:, :, self.length :] |= torch.eye(width, dtype=torch.bool)
        return torch.zeros(seen.shape).masked_fill_(~seen, _HIDDEN)[:, None]

    def _split(self, rows: int) -> list[tuple[int, int, int]]:
        """Splits rows into compiled batches: where each begins, how many rows it has, and its compiled size."""
        largest, blocks = self.batches[-1], []
        for start in range(0, rows, largest):
            count = min(largest, rows - start)
            blocks.append((start, count, next(size for size in self.batches if size >= count)))
        return blocks


def _rows(tensor: Tensor, start: int, count: int, size: int) -> Tensor:
    """Returns some rows, filled up to ``size`` with copies of the last."""
    some = tensor[start : start + count]
    return some if count == size else torch.cat([some, some[-1:].expand(size - count, *some.shape[1:])])


def _pairs(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(tensors[::2], tensors[1::2], strict=True)
