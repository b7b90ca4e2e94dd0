"""Finds what helps an operator that does not run on OpenVINO, and tries it where possible."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils import _pytree as pytree

from torchserve_openvino.backend.backend_settings import BackendSettings
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.runtime.compare import difference
from torchserve_openvino.backend.spec import OV_TYPES
from torchserve_openvino.backend.upstream._torch_private import python_implementation
from torchserve_openvino.config import ResolvedOptions
from torchserve_openvino.config.op_names import packet_name
from torchserve_openvino.config.vocabulary import canonical
from torchserve_openvino.doctor.describe import described
from torchserve_openvino.doctor.diagnosis import MappingDraft, NextStep
from torchserve_openvino.doctor.fixed_state import FixedState
from torchserve_openvino.doctor.mapping.formula import formula_for
from torchserve_openvino.doctor.mapping.mapping_writer import names, trace_op
from torchserve_openvino.doctor.mapping.skeletons import draft, mapping_file, mapping_test, parameters, upstream_files
from torchserve_openvino.doctor.rewrites import step_for_values
from torchserve_openvino.doctor.target import SampleCall, Target
from torchserve_openvino.errors import class_and_line
from torchserve_openvino.ops import op_name, overloads
from torchserve_openvino.ops.decompositions import own_decompositions
from torchserve_openvino.ops.mappings import registered
from torchserve_openvino.report import Tracker
from torchserve_openvino.serving.shapes.input_spec import Inputs

MAPPING = "my_ops"
_GUIDES = "https://docs.openvino.ai/2026/documentation/openvino-extensibility/frontend-extensions.html"


@dataclass(frozen=True)
class OpSample:
    """One node that was left out.

    Attributes:
        op: The node's target.
        seen: The arguments that it was called with.
        outputs: Its results, as fake tensors.
        kind: Class of the cause.
        reason: Why it was left out.
    """

    op: Any
    seen: SampleCall
    outputs: list[torch.Tensor]
    kind: str
    reason: str

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of all input and output tensors."""
        leaves = pytree.tree_leaves((self.seen.args, self.seen.kwargs, self.outputs))
        return {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}


class _Alone(torch.nn.Module):
    """Calls one operator with tensors; its other arguments are those of a call, as constants.

    It is a module and takes tensors alone, because torch.export takes nothing else.
    """

    def __init__(self, op: Any, call: SampleCall) -> None:
        super().__init__()
        self._op = op
        leaves, self._structure = pytree.tree_flatten((call.args, call.kwargs))
        self._constants = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]

    def forward(self, *tensors: torch.Tensor) -> Any:
        values = list(tensors)
        leaves = [values.pop(0) if constant is None else constant[0] for constant in self._constants]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return self._op(*args, **kwargs)


class Helper:
    """Finds next steps for the operators of one model.

    Args:
        target: The model.
    """

    def __init__(self, target: Target) -> None:
        self._options = target.options
        self._settings = _settings(target.options, target.backend)
        self._target = target
        self._found: dict[tuple[str, str], list[NextStep]] = {}

    def steps(self, sample: OpSample) -> list[NextStep]:
        """Returns the next steps, in the order in which to try them."""
        if sample.kind == "disabled_op":
            return [self._enable(sample)]
        if sample.kind == "tiny_partition":
            return [_TINY]
        # Where the types are the cause, a mapping does not help.
        foreign = sorted({str(dtype) for dtype in sample.dtypes if dtype not in OV_TYPES})
        values = step_for_values(f"on {foreign[0]}" if foreign else sample.reason)
        if values is not None:
            return [values]
        if not isinstance(sample.op, torch._ops.OpOverload):
            return [NextStep("rewrite", "write it in torch operators", f"{op_name(sample.op)} is not a torch op.")]
        # The same operator may be refused for several reasons; each has steps of its own.
        key = op_name(sample.op), sample.reason
        if key not in self._found:
            draft = self._draft(sample)
            steps = [self._decomposition(sample), self._mapping(draft), self._upstream(sample, draft)]
            self._found[key] = [step for step in steps if step is not None]
        return self._found[key]

    def _enable(self, sample: OpSample) -> NextStep:
        name = op_name(sample.op)
        options = replace(self._options.options, disabled_ops=())
        problem = self._problem(sample, replace(self._options, options=options))
        message = (
            f"Tried on the values seen: {problem}."
            if problem
            else "Tried on the values seen: the answer matches eager's."
        )
        return NextStep(
            "enable",
            f"remove {name} from disabled_ops",
            f"The configuration keeps it in eager PyTorch. {message} Where a wrong answer was the reason, "
            "`doctor --bisect` names the guilty operators.",
            proven=not problem,
        )

    # --- decomposition ----------------------------------------------------------------------------------------------

    def _decomposition(self, sample: OpSample) -> NextStep | None:
        """Tries torch's own decomposition in the real backend; returns None if there is none or it does not help."""
        if not torch._decomp.get_decompositions([sample.op]):
            return None
        name = op_name(sample.op)
        packet = packet_name(name)
        short = packet if torch._decomp.get_decompositions(overloads(packet)) else name
        changed = replace(self._options.options, decompositions=(*self._options.options.decompositions, short))
        options = replace(self._options, options=changed)
        graph = trace_op(sample.op, *sample.seen, _settings(options, self._target.backend).decompositions)
        if graph is None or name in names(graph):
            return None
        if self._problem(sample, options):
            return None
        into = ", ".join(names(graph))
        lines = {"pt2": {"compile": {"options": {"decompositions": [short]}}}}
        text = (
            f"torch decomposes it into {into}. Tried on the values seen: everything runs on OpenVINO, and the answer "
            "matches eager's."
        )
        return NextStep("decomposition", f"decompose {short}", text, proven=True, yaml=_yaml(lines))

    def _problem(self, sample: OpSample, options: ResolvedOptions) -> str:
        """Compiles the operator alone with these options and returns what is wrong; empty if nothing is."""
        alone = _Alone(sample.op, sample.seen).eval()
        leaves = pytree.tree_leaves((sample.seen.args, sample.seen.kwargs))
        tensors: Inputs = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), {}
        state = FixedState(alone)
        resolved = replace(options, options=replace(options.options, min_partition_us=0.0))
        compiled = compile_with(alone, CompileSpec(backend=self._target.backend, resolved=resolved))
        try:
            with compiled.poisoned():
                got, expected = state.run(compiled, tensors), state.run(alone, tensors)
        except Exception as error:
            return f"it fails: {class_and_line(error)}"
        summary = compiled.report.summary
        if summary.coverage < 1.0 or summary.fallbacks:
            return "; ".join(f"{fallback.op}: {fallback.reason}" for fallback in compiled.report.fallbacks)
        return difference(got, expected, summary.precision or "f32")

    # --- mapping and upstream ---------------------------------------------------------------------------------------

    def _draft(self, sample: OpSample) -> MappingDraft:
        implementation = python_implementation(sample.op)
        table: Mapping[Any, Any] = {
            **torch._decomp.core_aten_decompositions(),
            **torch._decomp.get_decompositions([sample.op]),
            **own_decompositions(),
        }
        formula = formula_for(sample.op, sample.seen, parameters(sample.op), table, implementation)
        outputs = [described(tensor) for tensor in sample.outputs]
        return draft(sample.op, sample.seen, formula, outputs, self._registered_in(implementation), described)

    def _registered_in(self, implementation: Callable[..., Any] | None) -> str:
        """Returns the file that registers a user's operator: the one with its Python code, or the model's file."""
        file = inspect.getsourcefile(inspect.unwrap(implementation)) if implementation is not None else None
        source = file or self._target.source
        # The folder of an unpacked archive no longer exists when the generated files are used.
        return Path(source).name if self._target.keep is not None else source

    def _mapping(self, draft: MappingDraft) -> NextStep:
        if draft.body:
            text = f"Its formula was derived from {draft.origin} and tested: it is within {draft.max_abs:.2g} of eager."
        else:
            text = "Its formula is not known: fill it in where the file says so; the test compares it with eager."
        return NextStep(
            "mapping",
            f"map {draft.op} to OpenVINO's operations",
            f"{text} Write the files with --write-mapping {MAPPING}.py.",
            proven=bool(draft.body),
            yaml=_yaml({"handler": {"openvino": {"op_mappings": f"{MAPPING}.py"}}}),
            files={
                f"{MAPPING}.py": mapping_file([draft], MAPPING),
                f"test_{MAPPING}.py": mapping_test([draft], MAPPING),
            },
            mapping=draft,
        )

    def _upstream(self, sample: OpSample, draft: MappingDraft) -> NextStep | None:
        if sample.op.namespace not in {"aten", "prims"}:
            # OpenVINO does not accept operators of single users; they belong in an extension library.
            return None
        text = f"Three pieces for a pull request, as OpenVINO's guides describe ({_GUIDES}); --cpp prints them."
        return NextStep("upstream", "add it to OpenVINO", text, files=upstream_files(sample.op, draft, sample.seen))


def _settings(options: ResolvedOptions, backend: str) -> BackendSettings:
    return BackendSettings(options, Tracker(), mappings=registered(), backend=canonical(backend))


def _yaml(lines: Mapping[str, Any]) -> str:
    return yaml.safe_dump(lines, default_flow_style=None, sort_keys=False)


_TINY = NextStep(
    "enable",
    "nothing to do: it is faster this way",
    "OpenVINO could run it, but calling it for so little work costs more than it saves. It joins a larger partition "
    "once the operators around it run on OpenVINO. To run it on OpenVINO anyway, set:",
    yaml=_yaml({"pt2": {"compile": {"options": {"min_partition_us": 0}}}}),
)
