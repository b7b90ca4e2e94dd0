"""The findings of a diagnosis as plain data; the renderers read nothing but its dict."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1


@dataclass
class OpRow:
    """All nodes of one operator.

    Attributes:
        op: ``aten.relu.default``.
        count: Nodes in the graphs that a call runs.
        on_openvino: How many of them run on OpenVINO.
        eager_ms: Time of all of them in eager PyTorch for one call, milliseconds.
        share: Share of the eager time of all operators, 0..1.
        where: ``file:line`` of each place in the user's code, in order; empty if torch does not record it.
    """

    op: str
    count: int = 0
    on_openvino: int = 0
    eager_ms: float = 0.0
    share: float = 0.0
    where: list[str] = field(default_factory=list)

    @property
    def runs_on(self) -> str:
        """Where the nodes run: ``openvino``, ``eager``, or ``both``."""
        if self.on_openvino == self.count:
            return "openvino"
        return "both" if self.on_openvino else "eager"


@dataclass
class MappingDraft:
    """What the templates need to write a mapping of one operator.

    Attributes:
        op: ``mylib.myop.default``.
        function: Name of the mapping's function.
        signature: Its parameters with their defaults.
        schema: The operator's schema.
        inputs: Observed arguments, as ``name=description``.
        outputs: Observed types and shapes.
        body: Statements of the function; empty if the formula is not known.
        origin: Where the formula comes from.
        max_abs: The formula's largest difference from eager on the observed values; None without a formula.
        test_args: Python code of arguments like the observed ones: the inside of a tuple.
        test_kwargs: The same for keyword arguments: the inside of a dict.
        registered_in: The user's file that registers the operator; empty for torch's own operators.
    """

    op: str
    function: str
    signature: str
    schema: str
    inputs: list[str]
    outputs: list[str]
    body: list[str]
    origin: str
    max_abs: float | None
    test_args: str
    test_kwargs: str
    registered_in: str


@dataclass
class NextStep:
    """One thing to do about an operator or a graph break.

    Attributes:
        kind: ``enable``, ``decomposition``, ``mapping``, ``rewrite`` or ``upstream``.
        title: What to do, in a few words.
        text: Why it helps, and how far that was tested.
        proven: Whether it was tried on the values of this call and works.
        yaml: Lines for model-config.yaml.
        files: Contents of files by file name.
        mapping: What the files were made from, so that the mappings of several operators can go into one file.
    """

    kind: str
    title: str
    text: str = ""
    proven: bool = False
    yaml: str = ""
    files: dict[str, str] = field(default_factory=dict)
    mapping: MappingDraft | None = None


@dataclass
class Refused:
    """The nodes of one operator that do not run on OpenVINO for the same reason.

    Attributes:
        kind: Class of the cause, as in the report's fallbacks.
        source: The user's source line of the first node.
        inputs: Arguments of the first node, as types and shapes.
        outputs: Types and shapes of its results.
    """

    op: str
    kind: str
    reason: str
    count: int = 0
    share: float = 0.0
    where: list[str] = field(default_factory=list)
    source: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    next_steps: list[NextStep] = field(default_factory=list)


@dataclass
class Break:
    """A graph break, with the user's line and what to write instead."""

    reason: str
    where: str
    source: str
    count: int
    next_steps: list[NextStep] = field(default_factory=list)


@dataclass
class Box:
    """A partition, or an operator in eager PyTorch, as a node of the picture.

    Attributes:
        id: Unique in the whole diagnosis.
        label: Name of the partition or the operator.
        runs_on: ``openvino``, ``eager`` or ``inductor``; ``input`` and ``output`` for the graph's ends.
        ops: Number of operators in it.
        ms: Its time in one call, milliseconds.
        op_counts: Number of operators by name.
    """

    id: str
    label: str
    runs_on: str
    ops: int = 0
    ms: float = 0.0
    share: float = 0.0
    op_counts: dict[str, int] = field(default_factory=dict)
    where: str = ""


@dataclass
class GraphPicture:
    """One graph as boxes in the order of data flow.

    Attributes:
        edges: Pairs of box ids, in the direction of data flow.
    """

    index: int
    where: str
    boxes: list[Box] = field(default_factory=list)
    edges: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Diagnosis:
    """Everything that was found out about a model.

    Attributes:
        inputs: Inputs of the call, as text.
        summary: Figures: see `diagnose`.
        comparison: ``verdict`` in words (empty if the answers agree), ``max_abs``, ``precision``, ``outputs``.
        report: The whole compile report.
        stock: What OpenVINO's own backend does with the model; None unless requested.
        bisection: Which operators make the answer wrong or OpenVINO fail; None unless requested, and if nothing runs on
            OpenVINO.
    """

    model: str
    inputs: list[str]
    summary: dict[str, Any]
    comparison: dict[str, Any]
    report: dict[str, Any]
    ops: list[OpRow] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    graph_breaks: list[Break] = field(default_factory=list)
    fallbacks: list[dict[str, Any]] = field(default_factory=list)
    decomposed: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[GraphPicture] = field(default_factory=list)
    stock: dict[str, Any] | None = None
    bisection: dict[str, Any] | None = None

    def drafts(self) -> list[MappingDraft]:
        """Returns a mapping draft for each operator that a mapping may help, one per operator."""
        steps = (step for refused in self.refused for step in refused.next_steps)
        by_op = {step.mapping.op: step.mapping for step in steps if step.mapping is not None}
        return list(by_op.values())

    @property
    def healthy(self) -> bool:
        """Whether everything runs on OpenVINO and the answer matches eager's, also in the compilations of --bisect."""
        searched = self.bisection is None or self.bisection["kind"] == "nothing_wrong"
        return bool(self.summary["all_on_openvino"]) and not self.comparison["verdict"] and searched

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis as a JSON-safe dict."""
        plain = {"schema": SCHEMA, **dataclasses.asdict(self), "healthy": self.healthy}
        for row, entry in zip(self.ops, plain["ops"], strict=True):
            entry["runs_on"] = row.runs_on
        return json.loads(json.dumps(plain, default=str))
