"""Answers questions with a span of a text; a long text is read in windows that overlap."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from torchserve_openvino.errors import InvalidInputError, ItemError, NonFiniteOutputError
from torchserve_openvino.serving.verification.measures import Measure, Top1
from torchserve_openvino.tasks.forms import Answer
from torchserve_openvino.tasks.hub_handler import RequestInput, text_of
from torchserve_openvino.tasks.request_body import Parameters, checked
from torchserve_openvino.tasks.text.text_handler import (
    Outputs,
    TextHandler,
    TextHead,
    TokenizedInput,
    TokenRow,
    too_long,
)

# Window and overlap of transformers' question-answering pipeline (version 4; version 5 has none).
_WINDOW, _OVERLAP = 384, 128
_FORBIDDEN = -10000.0


class QuestionParameters(Parameters):
    """Parameters of question answering, as in Hugging Face's inference API."""

    top_k: Annotated[int, Field(ge=1, le=100)] = 1
    """How many answers to return; with more than one, a list."""
    doc_stride: Annotated[int, Field(ge=1)] | None = None
    """How many tokens two windows of a long text share; 128, or half a window."""
    max_answer_len: Annotated[int, Field(ge=1, le=512)] = 15
    """Longest answer, in tokens."""
    max_seq_len: Annotated[int, Field(ge=8)] | None = None
    """Length of a window with its question, in tokens; at most what the model takes."""
    handle_impossible_answer: bool = False
    """Whether the empty answer is allowed."""
    align_to_words: bool = True
    """Whether answers begin and end with whole words."""


class Question(BaseModel):
    """What one input asks."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    question: str
    context: str


class Span(Answer):
    """A part of the context."""

    score: float
    """Its score."""
    start: int
    """Where it begins in the context, in characters."""
    end: int
    """Where it ends."""
    answer: str
    """Its text."""


class SpanHead(TextHead):
    """A model that returns scores for the first and the last token of the answer."""

    def outputs(self, output: Any, mask: torch.Tensor) -> Outputs:
        """Returns both, ``[batch, sequence]`` each."""
        return output.start_logits, output.end_logits


class QuestionAnswerer(TextHandler):
    """The best span of a text for a question, with its place and score."""

    task = "question_answerer"
    parameters = QuestionParameters
    takes = Question
    answers = Span | list[Span]
    fields = frozenset({"question", "context"})
    head = SpanHead

    def measure(self) -> Measure | None:
        """Returns what answers in a narrower precision must meet."""
        return Top1(leading=2)

    def read(self, part: RequestInput) -> Question:
        """Returns a question and its text."""
        question: Question = checked(lambda: Question.model_validate(part.input), "inputs")
        text_of(question.question, "question")
        text_of(question.context, "context")
        return question

    def encoded(self, parts: Sequence[RequestInput]) -> list[TokenizedInput | ItemError]:
        """Returns the windows of each input."""
        return [self._windows(part) for part in parts]

    def _windows(self, part: RequestInput) -> TokenizedInput | ItemError:
        window = min(self.limit, part.parameters.max_seq_len or _WINDOW)
        overlap = part.parameters.doc_stride or min(_OVERLAP, window // 2)
        question = len(self.tokenizer(part.input.question, add_special_tokens=False, verbose=False).input_ids)
        room = window - question - self.tokenizer.num_special_tokens_to_add(pair=True)
        if question > window // 2:
            return too_long(question, window // 2)
        if overlap >= room:
            return InvalidInputError(
                f"parameters.doc_stride is {overlap}, but a window holds only {room} tokens of the context beside the "
                "question"
            )
        texts = [part.input.question], [part.input.context]
        encodings = self.tokenizer(*texts, verbose=False).encodings
        beyond = len(encodings[0]) - window
        if beyond > 0:
            try:
                # Before they are made: each window is a list of its own, and windows may differ by a single token.
                self.refuse_too_many(
                    1 + math.ceil(beyond / (room - overlap)), f"windows of {window} tokens in the context"
                )
            except ItemError as error:
                return error
            encodings = self.tokenizer(
                *texts, truncation="only_second", max_length=window, stride=overlap,
                return_overflowing_tokens=True, verbose=False,
            ).encodings  # fmt: skip
        return TokenizedInput(part, [TokenRow(encoding) for encoding in encodings])

    def answer(self, tokenized: TokenizedInput, outputs: Sequence[Outputs]) -> Any:
        """Returns ``{score, start, end, answer}``, or a list of them."""
        parameters, context = tokenized.part.parameters, tokenized.part.input.context
        best: dict[tuple[int, int], float] = {}
        impossible = 1.0
        for row, (starts, ends) in zip(tokenized.rows, outputs, strict=True):
            spans, none = _spans(row, starts, ends, parameters.max_answer_len, parameters.top_k)
            impossible = min(impossible, none)
            for first, last, score in spans:
                span = _characters(row, first, last, parameters.align_to_words)
                best[span] = max(score, best.get(span, 0.0))
        answers = [
            {"score": score, "start": start, "end": end, "answer": context[start:end]}
            for (start, end), score in best.items()
        ]
        if parameters.handle_impossible_answer:
            answers.append({"score": impossible, "start": 0, "end": 0, "answer": ""})
        answers = sorted(answers, key=lambda found_answer: -float(found_answer["score"]))[: parameters.top_k]
        answers = answers or [{"score": 0.0, "start": 0, "end": 0, "answer": ""}]
        return answers[0] if parameters.top_k == 1 else answers


def _spans(
    row: TokenRow, starts: torch.Tensor, ends: torch.Tensor, longest: int, top_k: int
) -> tuple[list[tuple[int, int, float]], float]:
    """Returns the best spans of a window, and the score of there being no answer.

    Scores: transformers 4's question answering. Probabilities of first and last token, among the context's tokens and
    the first token, which stands for no answer, are multiplied.

    Args:
        row: The window.
        starts: Scores of each token as the first, ``[tokens]``.
        ends: Scores of each token as the last, ``[tokens]``.
        longest: Longest span in tokens.
        top_k: How many spans.

    Returns:
        ``(first token, last token, score)``, best first.
    """
    in_context = np.array([sequence_id == 1 for sequence_id in row.encoding.sequence_ids])
    allowed = in_context.copy()
    allowed[0] = True
    first, last = (_softmax(scores[: len(row)].float().numpy(), allowed) for scores in (starts, ends))
    none = float(first[0] * last[0])
    first[0] = last[0] = 0.0
    scores = np.tril(np.triu(np.outer(first, last)), longest - 1)
    scores[~in_context] = 0.0
    order = np.argsort(-scores, axis=None)[:top_k]
    spans = [(int(i // len(last)), int(i % len(last))) for i in order]
    return [(i, j, float(scores[i, j])) for i, j in spans if scores[i, j] > 0.0], none


def _softmax(scores: Any, allowed: Any) -> Any:
    if np.isnan(scores).any():
        raise NonFiniteOutputError("the model's scores are not numbers for this input")
    scores = np.where(allowed, scores, _FORBIDDEN)
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def _characters(row: TokenRow, first: int, last: int, whole_words: bool) -> tuple[int, int]:
    """Returns where a span of tokens begins and ends in the context, in characters."""
    encoding = row.encoding
    if whole_words:
        words = encoding.token_to_word(first), encoding.token_to_word(last)
        if None not in words:
            return encoding.word_to_chars(words[0], 1)[0], encoding.word_to_chars(words[1], 1)[1]
    return encoding.offsets[first][0], encoding.offsets[last][1]
