"""The base of the text tasks: tokenizer, lengths, and the way from texts through the model and back."""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.errors import (
    InvalidInputError,
    ItemError,
    ModelLoadError,
    PayloadTooLargeError,
)
from torchserve_openvino.serving.loading import hub
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.tasks.hub_handler import HubHandler, RequestInput, text_of
from torchserve_openvino.tasks.standard.form import Counted

# --- token sequences: what the tokenizer makes of texts, and how they become the model's tensors ------------------


@dataclass(frozen=True)
class TokenRow:
    """One token sequence.

    Attributes:
        encoding: The tokenizer's own result, with ids, offsets and so on (``tokenizers.Encoding``).
        positions: Those that the task asks about, if it asks about single ones.
    """

    encoding: Any
    positions: Sequence[int] = ()

    @staticmethod
    def of_tokens(ids: Sequence[int]) -> "TokenRow":
        """Returns the row of token ids that came as numbers, which have one token type."""
        return TokenRow(SimpleNamespace(ids=list(ids), attention_mask=[1] * len(ids), type_ids=[0] * len(ids)))

    def __len__(self) -> int:
        return len(self.encoding.ids)


def tokenize(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, limit: int, *, truncates: bool
) -> list[TokenRow | InvalidInputError]:
    """Tokenizes texts, or pairs of texts, in one batch.

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
    return [
        TokenRow(encoding) if len(encoding.ids) <= limit else too_long(len(encoding.ids), limit)
        for encoding in encodings
    ]


def too_long(tokens: int, limit: int) -> InvalidInputError:
    """Returns the refusal of a text with too many tokens."""
    return InvalidInputError(
        f"the text has {tokens} tokens; this model takes {limit} (handler.openvino.text.max_tokens; too_long: truncate "
        "drops the end)"
    )


def tensors(rows: Sequence[TokenRow], names: Sequence[str], pad: int, pad_type: int = 0) -> dict[str, torch.Tensor]:
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


def doublings(first: float, limit: float) -> Iterator[float]:
    """Yields ``first``, its doublings, and the middles between them, as long as they lie below a limit."""
    while first < limit:
        yield first
        if 1.5 * first < limit:
            yield 1.5 * first
        first *= 2


# --- the base of the text tasks: tokenizer, lengths, and the way from texts through the model and back ------------


LENGTH = "sequence"
# Longer texts are rare, and each compiled length costs time before READY; `max_tokens` raises it.
_USUAL_LIMIT = 512
# Compiled lengths are this far apart, up to this, so that little of a short text's batch is padding. One graph serves
# all lengths (`serving.shapes.one_graph`): each costs little more than its proof.
_STEP, _FINE = 16, 128
_KNOWN = ("input_ids", "attention_mask", "token_type_ids")
# Some tokenizers state this number, or one like it, where there is no limit.
_NO_LIMIT = 1_000_000

Outputs = tuple[torch.Tensor, ...]


class TextHead(nn.Module):
    """A Hugging Face model that returns only the tensors that a task reads, with what follows it in the same graph.

    Args:
        model: The model.
        takes_types: Whether it takes ``token_type_ids``.
    """

    def __init__(self, model: nn.Module, takes_types: bool) -> None:
        super().__init__()
        self.model = model
        self._takes_types = takes_types
        self.train(model.training)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> Outputs:
        """Runs the model on int64 tensors ``[batch, sequence]``."""
        types = {"token_type_ids": token_type_ids} if self._takes_types else {}
        return self.outputs(self.model(input_ids=input_ids, attention_mask=attention_mask, **types), attention_mask)

    def outputs(self, output: Any, mask: torch.Tensor) -> Outputs:
        """Returns the tensors that a task reads."""
        return (output.logits,)


@dataclass(frozen=True)
class TokenizedInput:
    """One input, tokenized.

    Attributes:
        part: The input and its parameters.
        rows: Its token sequences: one, or several where the task asks the model several times.
        facts: What the task needs again for the answer.
    """

    part: RequestInput
    rows: Sequence[TokenRow]
    facts: Any = None


class TextHandler(HubHandler):
    """A text task: `texts` says which texts an input asks the model about, `answer` reads the model's outputs.

    Attributes:
        head: The module that is compiled around the model.
        tokenizer: The model's tokenizer.
        limit: Longest sequence in tokens.
    """

    head: ClassVar[type[TextHead]] = TextHead

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: Any = None
        self.limit = _USUAL_LIMIT

    # --- loading ----------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> nn.Module:
        """Loads model and tokenizer, and completes the configuration with the compiled lengths."""
        model = super().load(folder)
        self.tokenizer = hub.load_tokenizer(folder)
        self.limit = self._limit(model, folder)
        self._openvino.config = self._with_lengths(self._openvino.config)
        return model

    def servable(self, model: Any) -> Any:
        """Returns the model inside the task's head."""
        return self.head(model, "token_type_ids" in self.names)

    def longest(self, folder: Path) -> int | None:
        """Returns the longest text that the model's files state for this task, if they do."""
        return None

    def _limit(self, model: Any, folder: Path) -> int:
        stated = [self.longest(folder), self.tokenizer.model_max_length, _positions(model.config)]
        own = min((int(length) for length in stated if length and length < _NO_LIMIT), default=_USUAL_LIMIT)
        configured = self._openvino.config.openvino.text.max_tokens
        if configured is not None and configured > own:
            raise ModelLoadError(
                f"handler.openvino.text.max_tokens is {configured}; {type(model).__name__} takes {own} tokens at most."
            )
        return configured or min(own, _USUAL_LIMIT)

    def _with_lengths(self, config: ServingConfig) -> ServingConfig:
        section = config.openvino
        if section.batching.mode == "exact":
            raise ModelLoadError(
                "handler.openvino.batching.mode: exact would take texts of the compiled lengths only, which no client "
                "knows. Texts are padded with a mask: take bucket, or dynamic."
            )
        if section.warmup.inputs or section.batching.dims:
            raise ModelLoadError(
                "handler.openvino.warmup.inputs and batching.dims are for models without a tokenizer of ours; this "
                "handler knows its inputs: set handler.openvino.text.lengths instead."
            )
        configured = section.text.lengths
        lengths = list(configured) if configured != "auto" else _lengths(self.limit)
        if lengths[-1] > self.limit:
            raise ModelLoadError(
                f"handler.openvino.text.lengths has {lengths[-1]}; the longest text has {self.limit} tokens "
                "(text.max_tokens)."
            )
        self.limit = lengths[-1]
        batching = section.batching.model_copy(update={"dims": {LENGTH: lengths}})
        return config.model_copy(update={"openvino": section.model_copy(update={"batching": batching})})

    @cached_property
    def names(self) -> list[str]:
        """The tensors that the model takes, in the order of the head's arguments."""
        taken = [name for name in _KNOWN if name in (*self.tokenizer.model_input_names, "attention_mask")]
        return taken if "input_ids" in taken else ["input_ids", *taken]

    def warmup_inputs(self) -> Sequence[WarmupInput]:
        """Returns token ids, their mask, and token types where the model has them."""
        config = self._openvino.eager_model.model.config
        types = max(1, int(getattr(config, "type_vocab_size", 0) or 1))
        known: Mapping[str, Mapping[str, Any]] = {
            "input_ids": {"low": 0, "high": self.vocabulary, "pad": self._pad},
            "attention_mask": {"mask": True},
            "token_type_ids": {"low": 0, "high": types, "pad": self.tokenizer.pad_token_type_id},
        }
        return [WarmupInput(name=name, shape=[LENGTH], dtype="int64", **known[name]) for name in self.names]

    @cached_property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        return int(self._openvino.eager_model.model.config.get_text_config().vocab_size)

    @property
    def _pad(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)

    def sample_inputs(self, body: bytes) -> Inputs:
        """Returns the model's inputs for one request's body."""
        tokenized = self.encoded([self.decode(part) for part in self.parts_of(body)])
        rows = [row for encodings in tokenized for row in self._rows_or_raise(encodings)]
        return (), self.inputs(rows)

    def inputs(self, rows: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        """Returns the model's inputs for rows; see `tensors`."""
        return tensors(rows, self.names, self._pad, self.tokenizer.pad_token_type_id)

    @staticmethod
    def _rows_or_raise(tokenized: TokenizedInput | ItemError) -> Sequence[TokenRow]:
        if isinstance(tokenized, ItemError):
            raise tokenized
        return tokenized.rows

    # --- requests ---------------------------------------------------------------------------------------------

    def decode(self, item: RequestInput) -> RequestInput:
        """Checks one input."""
        return replace(item, input=self.read(item))

    def refuse_too_many(self, count: int, what: str) -> None:
        """Limits what one input asks.

        Raises:
            PayloadTooLargeError: There are more than ``text.max_inputs``.
        """
        most = self._openvino.config.openvino.text.max_inputs
        if count > most:
            raise PayloadTooLargeError(f"{count} {what}; the most is {most} (handler.openvino.text.max_inputs)")

    def read(self, part: RequestInput) -> Any:
        """Returns an input of the form that this task takes.

        Raises:
            InvalidInputError: It has another form.
        """
        return text_of(part.input, part.form.field if part.form is not None else "inputs")

    def together(self, values: list[RequestInput]) -> list[TokenizedInput | ItemError]:
        """Tokenizes all inputs of a batch at once."""
        start = time.perf_counter()
        tokenized = self.encoded(values) if values else []
        self.record_time("TokenizerTime", start)
        return tokenized

    def texts(self, part: RequestInput) -> tuple[list[str], list[str] | None, Any]:
        """Returns the texts that an input asks the model about, their second halves if any, and facts for `answer`."""
        return [part.input], None, None

    def encoded(self, parts: Sequence[RequestInput]) -> list[TokenizedInput | ItemError]:
        """Returns the token sequences of each input, or its refusal."""
        encoded: list[TokenizedInput | ItemError | None] = [None] * len(parts)
        # A standard form may say for its own request whether a text is cut.
        for truncates in (False, True):
            positions = [position for position, part in enumerate(parts) if self._truncates(part) is truncates]
            rows = self._encoded([parts[position] for position in positions], truncates) if positions else []
            for position, row in zip(positions, rows, strict=True):
                encoded[position] = row
        return [text for text in encoded if text is not None]

    def _truncates(self, part: RequestInput) -> bool:
        if part.form is not None and part.form.truncates is not None:
            return part.form.truncates
        return bool(self._openvino.config.openvino.text.too_long == "truncate")

    def _encoded(self, parts: Sequence[RequestInput], truncates: bool) -> list[TokenizedInput | ItemError]:
        inputs = [self.texts(part) for part in parts]
        texts = [text for mine, _, _ in inputs for text in mine]
        paired = any(pairs is not None for _, pairs, _ in inputs)
        pairs = [text for _, mine, _ in inputs for text in mine or ()] if paired else None
        encodings = iter(tokenize(self.tokenizer, texts, pairs, self.limit, truncates=truncates))
        tokenized: list[TokenizedInput | ItemError] = []
        for part, (mine, _, facts) in zip(parts, inputs, strict=True):
            rows = [next(encodings) for _ in mine]
            refused = [(number, row) for number, row in enumerate(rows) if isinstance(row, InvalidInputError)]
            good = [row for row in rows if isinstance(row, TokenRow)]
            tokenized.append(self.refused_row(part, *refused[0]) if refused else TokenizedInput(part, good, facts))
        return tokenized

    def refused_row(self, part: RequestInput, number: int, error: InvalidInputError) -> InvalidInputError:
        """Returns the refusal of an input of which one text is too long; a task with several texts names it."""
        return error

    @abstractmethod
    def answer(self, tokenized: TokenizedInput, outputs: Sequence[Outputs]) -> Any:
        """Returns the answer to one input.

        Args:
            tokenized: The input.
            outputs: For each of its rows, the head's outputs for that row, still padded.

        Raises:
            ItemError: There is no answer.
        """

    def predict(self, values: list[TokenizedInput]) -> list[Any]:
        """Runs the rows of all inputs, and answers each input."""
        rows = [row for value in values for row in value.rows]
        outputs = iter(self._run(rows))
        answers: list[Any] = []
        for value in values:
            mine = [next(outputs) for _ in value.rows]
            try:
                self.check_finite([tensor for tensors_of_row in mine for tensor in tensors_of_row])
                answer = self.answer(value, mine)
                answers.append(answer if value.part.form is None else Counted(answer, sum(map(len, value.rows))))
            except ItemError as error:
                answers.append(error)
        return answers

    def _run(self, rows: Sequence[TokenRow]) -> list[Outputs]:
        outputs_of_rows: list[Outputs] = [()] * len(rows)
        groups = self.groups(rows, self._openvino.config.openvino.batching.dims[LENGTH])
        for group in groups:
            # Tensors made in inference mode would have to be copied (`inputs.ordinary`).
            batch = self.inputs([rows[i] for i in group])
            with torch.inference_mode():
                outputs = self.model(**batch)
                for index, position in enumerate(group):
                    outputs_of_rows[position] = tuple(output[index] for output in outputs)
        return outputs_of_rows

    def run_eager(self, value: TokenizedInput) -> Any:
        """Runs the eager model on one input's rows."""
        return self._openvino.eager_model(**self.inputs(value.rows))


def _positions(config: Any) -> int | None:
    """Returns the longest sequence for which the model has positions."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    # RoBERTa and its like count positions from the padding id on.
    offset = config.pad_token_id + 1 if config.model_type in _OFFSET_MODELS and config.pad_token_id is not None else 0
    return positions - offset


_OFFSET_MODELS = frozenset({"roberta", "xlm-roberta", "camembert", "longformer", "mpnet", "ibert", "data2vec-text"})


def _lengths(limit: int) -> list[int]:
    """Returns the limit, and below it: steps of 16 up to 128, then powers of two and the middles between them."""
    return [*range(_STEP, min(_FINE, limit), _STEP), *map(int, doublings(_FINE, limit)), limit]
