"""The base of tasks for Hugging Face models: from a folder of `save_pretrained` to answers, without user code."""

import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from torchserve_openvino.errors import InvalidInputError, ItemError, NotExplainedError, PayloadTooLargeError
from torchserve_openvino.serving.loading import hub
from torchserve_openvino.serving.loading.archive_manifest import has_f32
from torchserve_openvino.serving.loading.labels import LABELS, read_labels
from torchserve_openvino.serving.requests.batch_answer import AnswerList
from torchserve_openvino.serving.requests.batching import UNKNOWN_OVERHEAD, cheapest_groups
from torchserve_openvino.serving.requests.isolation import isolated
from torchserve_openvino.serving.requests.messages import Request
from torchserve_openvino.tasks.catalog import TASKS, Task, loader_of
from torchserve_openvino.tasks.items import NO_EXPLANATIONS, ItemHandler, body
from torchserve_openvino.tasks.request_body import (
    TEXT,
    Parameters,
    RequestBody,
    ask_in,
    check_characters,
    parameters_of,
    parse_body,
    parsed,
)
from torchserve_openvino.tasks.standard.form import (
    Endpoint,
    Form,
    ModelFacts,
    ModelList,
    form_for,
    in_form,
    is_model_list,
    refusal_form,
)


@dataclass(frozen=True)
class RequestInput:
    """One input of a request.

    Attributes:
        input: The input, as the request holds it.
        parameters: The request's parameters, checked.
        form: The standard form that it came in; None for the task's own.
    """

    input: Any
    parameters: Any
    form: Form | None = None


@dataclass(frozen=True)
class Addressed:
    """A request that came by itself, without an envelope.

    Attributes:
        item: As TorchServe passes it.
        path: What follows model and version in its URL.
    """

    item: Any
    path: str


class HubHandler(ItemHandler):
    """A task of Hugging Face's: `read` turns one input into a value, `predict` values into answers.

    A request may hold several inputs, in a list: each is answered, or refused, by itself.

    Attributes:
        task: Name of the task in the catalog.
        parameters: What a request may set.
        takes: Type of one input in JSON, for the task's JSON schema.
        answers: Type of the answer to one input.
        explanation_parameters: What a request to /explanations/ may set; None if the task has no explanations.
        explanations: Type of the explanation of one answer.
        fields: Names in an input that is an object, by which it is known without ``inputs`` around it.
        size_key: The configuration key that sets the largest request.
        flat: Field for the input in a request whose parameters stand beside it; empty if the task has no such form.
        endpoints: The standard forms that it takes besides.
        labels: The model's labels by number.
    """

    reads_archive = True
    task: ClassVar[str]
    parameters: ClassVar[type[Parameters]] = Parameters
    takes: ClassVar[Any] = str
    answers: ClassVar[Any] = Any
    explanation_parameters: ClassVar[type[Parameters] | None] = None
    explanations: ClassVar[Any] = None
    fields: ClassVar[frozenset[str]] = frozenset()
    flat: ClassVar[str] = ""
    size_key: ClassVar[str] = f"{TEXT}.max_bytes"
    endpoints: ClassVar[tuple[Endpoint, ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self._loaded = time.time()
        self.folder = Path()
        self.labels: dict[int, str] = {}

    @property
    def about(self) -> Task:
        """The task's entry in the catalog."""
        return TASKS[self.task]

    def read_archive(self) -> None:
        """Loads the model from the archive's folder."""
        self.folder = hub.hub_folder(self._openvino.model_dir)
        self.model = self.load(self.folder)
        self._most_items = self.limits()[1]
        self.mapping = read_labels(self._openvino.model_dir / LABELS)
        self.labels = {int(number): str(label) for number, label in (self.model.config.id2label or {}).items()}

    def load(self, folder: Path) -> nn.Module:
        """Loads the model, and what else the task needs; of a quantized model, everything but the weights."""
        loader = loader_of(self.about, hub.read_config(folder), sparse=hub.is_sparse(folder))
        if not has_f32(self._openvino.model_dir):
            return hub.without_weights(folder, loader)
        return hub.load_model(folder, loader, self.about.may_lack)

    def limits(self) -> tuple[int, int]:
        """Returns the largest body in bytes, and the most inputs in one request."""
        section = self._openvino.config.openvino.text
        return section.max_bytes, section.max_inputs

    @property
    def joins(self) -> bool:
        """Whether rows may share a call of the model."""
        served = self._openvino.served
        return served is None or served.joins

    def groups(self, rows: Sequence[Sized], lengths: Sequence[int]) -> list[list[int]]:
        """Groups rows of different lengths, which may be padded, into calls of the model.

        Args:
            rows: Token sequences, or anything else of different lengths.
            lengths: Compiled lengths, ascending.

        Returns:
            Positions in ``rows`` of each call.
        """
        if not self.joins:
            return [[position] for position in range(len(rows))]
        served = self._openvino.served
        sizes, overhead = (served.sizes, served.overhead) if served is not None else ((), UNKNOWN_OVERHEAD)
        return cheapest_groups(rows, lengths, sizes, overhead)

    def _answered(self, items: list[Any], requests: Sequence[Request]) -> list[Any]:
        if requests[0].envelope is None:
            items = [Addressed(item, request.path) for item, request in zip(items, requests, strict=True)]
        return super()._answered(items, requests)

    def answer_items(self, items: list[Any]) -> list[Any]:
        """Returns an answer for each item; for an item with a list of inputs, a list of answers and refusals."""
        return self._part_by_part(items, self.parameters, lambda parts: self._through(parts, self._predicted))

    def explain_items(self, items: list[Any]) -> list[Any]:
        """Returns an explanation for each item, in the same way."""
        kind = self.explanation_parameters
        if kind is None:
            return [NotExplainedError(NO_EXPLANATIONS) for _ in items]
        return self._part_by_part(items, kind, lambda parts: self._through(parts, self._explained))

    def _part_by_part(
        self, items: list[Any], kind: type[Parameters], answered: Callable[[list[RequestInput]], list[Any]]
    ) -> list[Any]:
        asks = [isolated(partial(self._asked, item, kind)) for item in items]
        parts = [part for ask in asks if not isinstance(ask, ItemError) for part in ask[1]]
        answers = iter(answered(parts) if parts else [])
        together: list[Any] = []
        for ask in asks:
            if isinstance(ask, ItemError):
                together.append(ask)
                continue
            mine = [next(answers) for _ in ask[1]]
            if ask[0].form is not None:
                together.append(isolated(partial(in_form, ask[0].form.refusal, partial(ask[0].form.written, mine))))
            else:
                together.append(AnswerList(mine) if ask[0].many else mine[0])
        return together

    def _asked(self, item: Any, kind: type[Parameters]) -> tuple[RequestBody, list[RequestInput]]:
        max_bytes, max_inputs = self.limits()
        if isinstance(item, Addressed):
            if kind is self.parameters and (self.endpoints or item.path):
                return self._asked_at(item.path, item.item)
            item = item.item
        return self._checked(self.ask(body(_opened(item)), max_bytes, max_inputs), kind)

    def _asked_at(self, path: str, item: Any) -> tuple[RequestBody, list[RequestInput]]:
        """Reads a request that may be in a standard form; a refusal is in the same form."""
        max_bytes, max_inputs = self.limits()

        def read() -> tuple[type[Form] | None, Any]:
            if is_model_list(path):
                return ModelList, path
            if not self.endpoints:
                # Judged first: what is sent there, such as a form with a file, may be nothing that this task reads.
                return form_for((), path, None), body(_opened(item))
            value = parsed(body(_opened(item)), max_bytes, self.size_key)
            return form_for(self.endpoints, path, value), value

        kind, value = in_form(refusal_form(self.endpoints, path), read)
        if kind is not None:
            return in_form(
                kind.refusal, lambda: self._checked(_ask_of(kind(value, self.served_model())), self.parameters)
            )
        if self.endpoints:
            ask = ask_in(value, max_inputs=max_inputs, fields=self.fields)
        else:
            ask = self.ask(value, max_bytes, max_inputs)
        return self._checked(ask, self.parameters)

    def served_model(self) -> ModelFacts:
        """Returns what standard forms depend on of the model."""
        return ModelFacts(self._openvino.model_name, self._loaded, self.limits()[1])

    def _checked(self, ask: RequestBody, kind: type[Parameters]) -> tuple[RequestBody, list[RequestInput]]:
        """Returns a request with its inputs, whose parameters and size are checked."""
        checked = parameters_of(kind, ask.parameters)
        parts = [RequestInput(item, checked, ask.form) for item in ask.inputs]
        # Before any of them is tokenized, which takes much more time and memory than the request itself.
        characters, most = sum(map(self.characters, parts)), self._openvino.config.openvino.text.max_bytes
        if characters > most:
            raise PayloadTooLargeError(
                f"the tokenizer would read {characters} characters, since texts are repeated; the most is {most} "
                f"({TEXT}.max_bytes): send fewer or shorter ones in one request"
            )
        return ask, parts

    def characters(self, part: RequestInput) -> int:
        """Returns how many characters the tokenizer reads for an input, which is not checked yet.

        A task that tokenizes a text several times, with each label for instance, overrides this.
        """
        return 0

    def parts_of(self, sample: bytes) -> list[RequestInput]:
        """Returns the inputs of a sample request.

        Raises:
            ItemError: It is no request for this task.
        """
        return self._asked({"body": sample}, self.parameters)[1]

    def ask(self, value: Any, max_bytes: int, max_inputs: int) -> RequestBody:
        """Reads what one request asks."""
        return parse_body(value, max_bytes=max_bytes, max_inputs=max_inputs, fields=self.fields, key=self.size_key)

    def describe_handle(self) -> dict[str, Any]:
        """Returns the report, with the task and a JSON schema of its parameters."""
        about = self.about
        schema = self.parameters.model_json_schema()
        task = {"name": about.handler, "inputs": about.inputs, "outputs": about.outputs, "parameters": schema}
        return {**super().describe_handle(), "task": task}

    def label(self, number: int) -> str:
        """Returns a label's name; a number without a name is LABEL_n, as in transformers."""
        return self.mapping_of(number) or self.labels.get(number, f"LABEL_{number}")

    def mapping_of(self, number: int) -> str | None:
        """Returns a label's name in the archive's index_to_name.json, which wins over the model's own."""
        label = (self.mapping or {}).get(str(number))
        return str(label[-1] if isinstance(label, list) else label) if label is not None else None


def _ask_of(form: Form) -> RequestBody:
    return RequestBody(list(form.inputs), form.parameters, form.many, form)


def text_of(value: Any, what: str = "inputs") -> str:
    """Returns a value that has to be a text.

    Raises:
        InvalidInputError: It is something else, or empty.
    """
    if not isinstance(value, str):
        raise InvalidInputError(f"{what} must be a text, not {_kind(value)}")
    if not value.strip():
        raise InvalidInputError(f"{what} is empty")
    check_characters(value, what)
    return value


def sentence_characters(labels: Sequence[str], template: str) -> int:
    """Returns the characters of a template with each label in its places, before any such sentence is made."""
    return len(labels) * len(template) + template.count("{}") * sum(map(len, labels))


def _opened(value: Any) -> Any:
    """Returns what one input of KServe's protocol holds, if its envelope was opened: a string, or JSON in a string."""
    is_input = isinstance(value, Mapping) and value.keys() >= {"name", "shape", "datatype", "data"}
    return value["data"] if is_input else value


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}.get(
        type(value), "null" if value is None else type(value).__name__
    )
