"""Fills the masked word of a text."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from torchserve_openvino.errors import InvalidInputError
from torchserve_openvino.serving.verification.measures import Measure, Top1
from torchserve_openvino.tasks.forms import Answer
from torchserve_openvino.tasks.hub import Part, text_of
from torchserve_openvino.tasks.request_body import Parameters
from torchserve_openvino.tasks.text.base import Outputs, Rows, TextHandler

# Each word comes with the whole text.
_MOST = 1000


class MaskParameters(Parameters):
    """Parameters of fill-mask, as in Hugging Face's inference API."""

    top_k: Annotated[int, Field(ge=1, le=_MOST)] = 5
    """How many words to return for each mask."""
    targets: list[str] | None = None
    """The only words to score; each has to be one token."""


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


class FillMask(TextHandler):
    """The most probable words in place of the mask token."""

    task = "fill_mask"
    parameters = MaskParameters
    # For several masks, a list for each.
    answers = list[Filled] | list[list[Filled]]

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return Top1()

    def read(self, part: Part) -> str:
        """Returns a text with at least one mask token."""
        text, mask = text_of(part.input), str(self.tokenizer.mask_token)
        if mask not in text:
            raise InvalidInputError(f"the text has no {mask}, the token that this model fills")
        return text

    def answer(self, tokenized: Rows, outputs: Sequence[Outputs]) -> list[Any]:
        """Returns ``[{score, token, token_str, sequence}]``; for several masks, a list of these for each."""
        (row,), ((logits,),) = tokenized.rows, outputs
        ids, mask = list(row.encoding.ids), self.tokenizer.mask_token_id
        positions = [position for position, token in enumerate(ids) if token == mask]
        if not positions:
            raise InvalidInputError("the mask lies behind the text's last token that this model takes")
        parameters = tokenized.part.parameters
        if (words := len(positions) * parameters.top_k) > _MOST:
            raise InvalidInputError(
                f"{len(positions)} masks with top_k {parameters.top_k} are {words} words; the most is {_MOST}"
            )
        targets = self._targets(parameters.targets)
        filled = []
        for position in positions:
            scores = torch.softmax(logits[position].float(), dim=-1)
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
        vocabulary = self.tokenizer.get_vocab()
        tokens = []
        for word in words:
            ids = [vocabulary[word]] if word in vocabulary else self.tokenizer(word, add_special_tokens=False).input_ids
            if len(ids) != 1 or ids[0] == self.tokenizer.unk_token_id:
                raise InvalidInputError(f"targets: {word!r} is not one token of this model")
            tokens.append(ids[0])
        if not tokens:
            raise InvalidInputError("targets is an empty list")
        return list(dict.fromkeys(tokens))
