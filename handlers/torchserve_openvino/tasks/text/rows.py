"""Token sequences: what the tokenizer makes of texts, and how they become the model's tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from torchserve_openvino.errors import InvalidInputError

# What a call of the model costs beside its tokens, in tokens.
_CALL_TOKENS = 8


@dataclass(frozen=True)
class Row:
    """One token sequence.

    Attributes:
        encoding: The tokenizer's own result, with ids, offsets and so on (``tokenizers.Encoding``).
    """

    encoding: Any

    @staticmethod
    def of_tokens(ids: Sequence[int]) -> "Row":
        """Returns the row of token ids that came as numbers, which have one token type."""
        return Row(SimpleNamespace(ids=list(ids), attention_mask=[1] * len(ids), type_ids=[0] * len(ids)))

    def __len__(self) -> int:
        return len(self.encoding.ids)


def tokenised(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, limit: int, *, truncates: bool
) -> list[Row | InvalidInputError]:
    """Tokenises texts, or pairs of texts, in one batch.

    Args:
        tokenizer: A fast tokenizer of transformers.
        texts: The texts.
        pairs: The second text of each; None for single texts.
        limit: Longest sequence in tokens, with the special ones.
        truncates: Whether the end of a longer one is dropped; the longer of a pair loses first.

    Returns:
        A row for each, or the refusal of a text that is too long.
    """
    how: dict[str, Any] = {"truncation": True, "max_length": limit} if truncates else {"truncation": False}
    encodings = tokenizer(list(texts), list(pairs) if pairs is not None else None, verbose=False, **how).encodings
    return [Row(each) if len(each.ids) <= limit else too_long(len(each.ids), limit) for each in encodings]


def too_long(tokens: int, limit: int) -> InvalidInputError:
    """Returns the refusal of a text with too many tokens."""
    return InvalidInputError(
        f"the text has {tokens} tokens; this model takes {limit} (handler.openvino.text.max_tokens; too_long: truncate "
        "drops the end)"
    )


def tensors(rows: Sequence[Row], names: Sequence[str], pad: int, pad_type: int = 0) -> dict[str, torch.Tensor]:
    """Returns the model's inputs for rows, padded on the right to the longest: int64 ``[rows, tokens]`` each.

    Args:
        rows: Token sequences.
        names: The inputs that the tokenizer names for its model.
        pad: Token id of the padding.
        pad_type: Token type of the padding.
    """
    width = max(map(len, rows))
    columns: Mapping[str, tuple[Callable[[Any], list[int]], int]] = {
        "input_ids": (lambda encoding: encoding.ids, pad),
        "attention_mask": (lambda encoding: encoding.attention_mask, 0),
        "token_type_ids": (lambda encoding: encoding.type_ids, pad_type),
    }
    inputs = {}
    for name in names:
        read, fill = columns[name]
        values = [read(row.encoding) for row in rows]
        inputs[name] = torch.tensor([value + [fill] * (width - len(value)) for value in values], dtype=torch.int64)
    return inputs


def by_length(rows: Sequence[Sized], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Groups rows by the compiled length that they are padded to, so that a short one is not run as a long one.

    Args:
        rows: Token sequences, or anything else of different lengths.
        lengths: Compiled lengths, ascending; empty where any length is compiled.

    Yields:
        Positions in ``rows``.
    """
    groups: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        groups.setdefault(_next(lengths, len(row)), []).append(position)
    yield from groups.values()


def fewest_tokens(rows: Sequence[Sized], lengths: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Groups rows into batches so that as little as possible is padding, in length and in number of rows.

    Args:
        rows: Token sequences of different lengths.
        lengths: Compiled lengths, ascending; empty where any length is compiled.
        sizes: Compiled batch sizes, ascending; empty where any size is.

    Returns:
        Positions in ``rows`` of each batch; the fewest tokens in all, where a batch itself counts as `_CALL_TOKENS`.
    """
    order = sorted(range(len(rows)), key=lambda position: len(rows[position]))
    widths = [_next(lengths, len(rows[position])) for position in order]
    largest = sizes[-1] if sizes else len(rows)
    # best[n]: the fewest tokens for the first n rows, and where their last batch begins.
    best = [(0, 0)]
    for end in range(1, len(order) + 1):
        starts = range(max(0, end - largest), end)
        best.append(min((best[i][0] + _next(sizes, end - i) * widths[end - 1] + _CALL_TOKENS, i) for i in starts))
    groups, end = [], len(order)
    while end:
        groups.append(order[best[end][1] : end])
        end = best[end][1]
    return groups


def doublings(first: float, limit: float) -> Iterator[float]:
    """Yields ``first``, its doublings, and the middles between them, as long as they lie below a limit."""
    while first < limit:
        yield first
        if 1.5 * first < limit:
            yield 1.5 * first
        first *= 2


def _next(sizes: Sequence[int], size: int) -> int:
    """Returns the compiled size that a size is padded to; the size itself beyond the largest."""
    return next((each for each in sizes if each >= size), size)
