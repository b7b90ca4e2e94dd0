"""Fills the masked word of a text."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated, Any

import torch
from pydantic import Field

from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.errors import InvalidInputError, ItemError
from torchserve_openvino.serving.requests.isolation import isolated
from torchserve_openvino.serving.verification.measures import Measure, Top1
from torchserve_openvino.tasks.forms import Answer
from torchserve_openvino.tasks.hub_handler import RequestInput, text_of
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.text.text_handler import Outputs, TextHandler, TextHead, TokenizedInput, TokenRow

# Each word comes with the whole text.
_MOST = 1000
# No token is longer, in characters.
_LONGEST_WORD = 256
# Masks of a text that one row of a call fills; almost all texts have one.
_MASKS = 4
_POSITIONS = "mask_positions"


class MaskParameters(Parameters):
    """Parameters of fill-mask, as in Hugging Face's inference API."""

    top_k: Annotated[int, Field(ge=1, le=_MOST)] = 5
    """How many words to return for each mask."""
    targets: Annotated[list[str], Field(max_length=_MOST)] | None = None
    """The only words to score, up to 1,000; each has to be one token."""


class Filled(Answer):
    """A word for a mask."""

    score: float
    """Its probability."""
    token: int
    """Its number in the model's vocabulary."""
    token_str: str
    """The word."""
    sequence: str
    """The text with it."""


class MaskHead(TextHead):
    """A language model that returns scores of words at some positions alone: the vocabulary is large."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None,
        mask_positions: torch.Tensor | None = None,
    ) -> Outputs:  # fmt: skip
        """Runs the model on int64 tensors ``[batch, sequence]``; positions are ``[batch, masks]``."""
        assert mask_positions is not None
        (logits,) = super().forward(input_ids, attention_mask, token_type_ids)
        # As many as there are logits: counted by the positions, they could be some of them, and all would be computed.
        rows = torch.arange(len(logits), device=logits.device)
        return (logits[rows[:, None], mask_positions],)


class FillMask(TextHandler):
    """The most probable words in place of the mask token."""

    head = MaskHead
    task = "fill_mask"
    parameters = MaskParameters
    # For several masks, a list for each.
    answers = list[Filled] | list[list[Filled]]

    def __init__(self) -> None:
        super().__init__()
        # Each text of a request has the same targets.
        self._token_of = lru_cache(4 * _MOST)(self._one_token)

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return Top1()

    def read(self, part: RequestInput) -> str:
        """Returns a text with at least one mask token."""
        text, mask = text_of(part.input), str(self.tokenizer.mask_token)
        if mask not in text:
            raise InvalidInputError(f"the text has no {mask}, the token that this model fills")
        return text

    def warmup_inputs(self) -> Sequence[WarmupInput]:
        """Returns the inputs of the model, and the positions of masks."""
        return [*super().warmup_inputs(), WarmupInput(name=_POSITIONS, shape=[_MASKS], dtype="int64")]

    def inputs(self, rows: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        """Returns the model's inputs for rows; where one has fewer masks, the last is repeated."""
        positions = [[*row.positions, *[row.positions[-1]] * _MASKS][:_MASKS] for row in rows]
        return {**super().inputs(rows), _POSITIONS: torch.tensor(positions, dtype=torch.int64)}

    def encoded(self, parts: Sequence[RequestInput]) -> list[TokenizedInput | ItemError]:
        """Returns the token sequence of each input, once for every few of its masks, or its refusal."""
        return [
            isolated(partial(self._by_masks, text)) if isinstance(text, TokenizedInput) else text
            for text in super().encoded(parts)
        ]

    def _by_masks(self, tokenized: TokenizedInput) -> TokenizedInput:
        (row,), mask, top_k = tokenized.rows, self.tokenizer.mask_token_id, tokenized.part.parameters.top_k
        positions = [position for position, token in enumerate(row.encoding.ids) if token == mask]
        if not positions:
            raise InvalidInputError("the mask lies behind the text's last token that this model takes")
        if (words := len(positions) * top_k) > _MOST:
            raise InvalidInputError(f"{len(positions)} masks with top_k {top_k} are {words} words; the most is {_MOST}")
        self.refuse_too_many(-(-len(positions) // _MASKS), f"groups of {_MASKS} masks")
        starts = range(0, len(positions), _MASKS)
        rows = [TokenRow(row.encoding, positions[start : start + _MASKS]) for start in starts]
        return replace(tokenized, rows=rows)

    def answer(self, tokenized: TokenizedInput, outputs: Sequence[Outputs]) -> list[Any]:
        """Returns ``[{score, token, token_str, sequence}]``; for several masks, a list of these for each."""
        ids, parameters = list(tokenized.rows[0].encoding.ids), tokenized.part.parameters
        positions = [position for row in tokenized.rows for position in row.positions]
        logits = torch.cat([output for (output,) in outputs])
        targets = self._targets(parameters.targets)
        filled = []
        for index, position in enumerate(positions):
            scores = torch.softmax(logits[index].float(), dim=-1)
            scores = scores[targets] if targets is not None else scores
            best = torch.topk(scores, min(parameters.top_k, len(scores)))
            tokens = best.indices.tolist()
            tokens = [targets[token] for token in tokens] if targets is not None else tokens
            filled.append([
                self._word(ids, position, token, score, single=len(positions) == 1)
                for token, score in zip(tokens, best.values.tolist(), strict=True)
            ])  # fmt: skip
        return filled[0] if len(filled) == 1 else filled

    def _word(self, ids: list[int], position: int, token: int, score: float, *, single: bool) -> dict[str, Any]:
        changed = [*ids[:position], token, *ids[position + 1 :]]
        # With several masks, the others stay in the sequence.
        sequence = self.tokenizer.decode(changed, skip_special_tokens=single)
        return {"score": score, "token": token, "token_str": self.tokenizer.decode([token]), "sequence": sequence}

    def _targets(self, words: list[str] | None) -> list[int] | None:
        """Returns the tokens of the words to score.

        Raises:
            InvalidInputError: A word is not one token of the model's.
        """
        if words is None:
            return None
        tokens = []
        for word in dict.fromkeys(words):
            token = self._token_of(word) if len(word) <= _LONGEST_WORD else None
            if token is None:
                raise InvalidInputError(f"targets: {word!r:.100} is not one token of this model")
            tokens.append(token)
        if not tokens:
            raise InvalidInputError("targets is an empty list")
        return list(dict.fromkeys(tokens))

    def _one_token(self, word: str) -> int | None:
        """Returns the token that a word is; None if it is several, or unknown."""
        unknown = {None, self.tokenizer.unk_token_id}
        ids = [self.tokenizer.convert_tokens_to_ids(word)]
        if ids[0] in unknown:
            ids = self.tokenizer(word, add_special_tokens=False).input_ids
        return ids[0] if len(ids) == 1 and ids[0] not in unknown else None
