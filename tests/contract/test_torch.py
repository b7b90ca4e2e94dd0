"""Pins what `backend/upstream/_torch_private.py` uses of torch's private modules, for each tested version."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import run_backend
from torchserve_openvino.backend.upstream._torch_modes import has_hooks
from torchserve_openvino.backend.upstream._torch_private import is_traced, python_implementation
from torchserve_openvino.serving.versions.tested import TESTED, minor
from versions import until

aten = torch.ops.aten


def test_the_tested_version() -> None:
    assert minor(torch.__version__) in TESTED["torch"], "run all of CI on this version, then name it in TESTED"


def test_weights_are_graph_inputs_and_static() -> None:
    seen = []

    def compiler(gm, example_inputs) -> None:
        context = torch._guards.TracingContext.try_get()
        seen.append((len(example_inputs), list(context.fw_metadata.static_input_indices)))
        assert all(hasattr(info, "mutates_data") for info in context.fw_metadata.input_info)

    run_backend(nn.Linear(3, 2), torch.ones(1, 3), compiler=compiler)
    assert seen in ([(3, [0, 1])], [(3, [1, 2])])


def test_dynamo_reuses_one_graph_for_modules_of_the_same_code() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            torch._dynamo.graph_break()
            return x + 1

    graphs = run_backend(nn.Sequential(Block(), Block(), Block()), torch.ones(1, 3))
    linears = [gm for gm, inputs in graphs if len(inputs) == 3]
    assert 0 < len(linears) < 3


def test_graph_break_reason_rides_on_the_graph() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    (first, _), (second, _) = run_backend(model, torch.ones(2))
    assert first.compile_subgraph_reason.graph_break and not second.compile_subgraph_reason.graph_break
    assert first.compile_subgraph_reason.user_stack[-1].filename == __file__
    assert torch._dynamo.utils.graph_break_reasons[-1] is first.compile_subgraph_reason


def test_recompile_reason_is_in_the_compilation_metrics() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    frames = torch._dynamo.utils.counters["frames"]["total"]
    compiled(torch.ones(3))
    assert torch._dynamo.utils.counters["frames"]["total"] == frames + 1
    entry = torch._dynamo.utils.get_compilation_metrics()[-1]
    assert "size mismatch" in entry.recompile_reason
    assert entry.co_filename == __file__ and entry.graph_op_count == 1


def test_data_swap_and_data_write_move_no_version_counter() -> None:
    """Why `WeightWatch` also compares pointers and sampled bytes."""
    weight = nn.Parameter(torch.ones(3))
    version, pointer = weight._version, weight.data_ptr()
    weight.data.add_(1)
    assert weight._version == version and weight.data_ptr() == pointer
    weight.data = torch.zeros(3)
    assert weight._version == version and weight.data_ptr() != pointer
    with torch.no_grad():
        weight.add_(1)
    assert weight._version == version + 1


def test_compile_takes_a_recompile_limit_of_its_own() -> None:
    names = inspect.signature(torch.compile).parameters
    assert {"recompile_limit", "isolate_recompiles"} <= names.keys()


def test_decomposition_tables() -> None:
    assert torch.ops.aten.addcdiv.default in torch._decomp.core_aten_decompositions()
    assert torch._decomp.get_decompositions([torch.ops.aten.addcdiv.default])


def test_fused_inference_kernels_have_no_decomposition() -> None:
    """Why `ops/rules/layers.py` has its own."""
    kernels = [
        torch.ops.aten._transformer_encoder_layer_fwd.default,
        torch.ops.aten._native_multi_head_attention.default,
    ]
    assert not torch._decomp.get_decompositions(kernels)


def test_reading_a_tree_may_import_modules_for_two_kinds_of_container() -> None:
    """Why `backend/routes/serialized_graph.py` refuses them."""
    assert "import_module" in inspect.getsource(pytree.enum_object_hook)
    assert "import_module" in inspect.getsource(pytree._defaultdict_deserialize)
    spec = pytree.tree_flatten({"a": (1, [2])})[1]
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@until(2, 15, "Dynamo guards the sign of 0")
def test_dynamo_takes_zero_and_minus_zero_for_the_same_input() -> None:
    """A defect of torch.compile that no backend can detect."""
    compiled = torch.compile(lambda x, s: x / s, backend="eager", dynamic=False)
    assert compiled(torch.ones(1), 0.0) == compiled(torch.ones(1), -0.0) == float("inf")


def test_a_custom_operator_keeps_its_python_function() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.library.custom_op("contract::twice", twice, mutates_args=())
    assert python_implementation(torch.ops.contract.twice.default) is twice
    assert python_implementation(torch.ops.aten.relu.default) is None


def test_the_tracer_tells_constants_from_what_it_follows() -> None:
    seen = []
    outside = torch.ones(2)

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            seen.extend([is_traced(x), is_traced(y), is_traced([y, None]), is_traced(outside), is_traced(3)])
            return y

    torch.jit.trace(Net(), torch.zeros(2), check_trace=False)
    assert seen == [True, True, True, False, False]


def test_under_a_dispatch_mode_the_tracer_misses_convolutions() -> None:
    """Why `backend/conversion/convert_ts.py` traces in a new thread: AOTAutograd's first call has such a mode."""

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.convolution.default(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1).relu()

    w, x = torch.randn(4, 3, 3, 3), torch.zeros(1, 3, 8, 8)
    with torch.no_grad(), Passing():
        traced = torch.jit.trace(Net(), x, check_trace=False)
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert "aten::relu" in kinds and "aten::_convolution" not in kinds


def test_export_keeps_the_very_tensors_and_drops_changes_of_plain_attributes() -> None:
    """What `backend/capture/export.py` and `backend/capture/module_state.py` rely on."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift, self.items, self.calls = nn.Linear(2, 2), torch.ones(2), [torch.ones(2)], 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.linear(x) + self.shift + self.items[0]

    model = Net().eval()
    with torch.no_grad():
        program = torch.export.export(model, (torch.zeros(1, 2),), strict=False)
    assert model.calls == 0
    assert program.constants["shift"] is model.shift
    assert any(tensor is model.items[0] for tensor in program.constants.values())
    assert [spec.target for spec in program.graph_signature.input_specs][:2] == ["linear.weight", "linear.bias"]


TRANSPOSED, SCALAR = torch.randn(5, 10).T, torch.tensor(4.5)


@pytest.mark.parametrize(
    ("name", "call", "right"),
    [
        ("a product", lambda x, s: aten.mul.Tensor(x, s), True),
        ("a copied sign", lambda x, s: aten.copysign.Tensor(x, s), False),
        ("a floored quotient", lambda x, s: aten.div.Tensor_mode(x, s, rounding_mode="floor"), False),
        ("a power of a number", lambda x, s: aten.pow.Scalar(2.0, x), False),
        ("log-sigmoid", lambda x, s: aten.log_sigmoid_forward.default(x)[0], False),
        ("taken by an index", lambda x, s: aten.index.Tensor(x, [None, (x[:3, :4] > 9).long()]), False),
    ],
)
def test_the_memory_order_of_fake_tensors(name: str, call: Any, right: bool) -> None:
    """`ops.memory_order` and `Rule.decompose_strided` correct those that differ from eager."""
    with FakeTensorMode() as mode:
        fake = call(mode.from_tensor(TRANSPOSED), mode.from_tensor(SCALAR))
    assert (fake.stride() == call(TRANSPOSED, SCALAR).stride()) == right, name


@until(2, 15, "the pass raises NotImplementedError instead")
@pytest.mark.parametrize("add", [torch.add, torch.sub])
def test_alpha_is_dropped_where_the_second_operand_is_a_symbol(add: Callable[..., Any]) -> None:
    """torch/fx/passes/_tensorify_python_scalars.py passes on positional arguments only (`ops.rules.elementwise`)."""
    compiled = torch.compile(lambda x, y, alpha: add(x, y, alpha=alpha), backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(torch.ones(2), 0.5, 3.0), add(torch.ones(2), 0.5))


@until(2, 15, "torch takes those before the end alone")
def test_labels_behind_the_end_count_where_torch_decomposes_their_loss() -> None:
    """Why `ops.opaque_ops` has a composition of its own."""
    x, target = torch.tensor([[0.1, 0.2, 0.4]]), torch.tensor([[2, -1, 1]])
    compiled = torch.compile(torch.nn.functional.multilabel_margin_loss, backend="aot_eager")
    with torch.no_grad():
        assert compiled(x, target) > torch.nn.functional.multilabel_margin_loss(x, target) + 0.5


def test_a_write_to_one_window_changes_others_that_share_its_memory() -> None:
    """docs/limits.md: in a graph, windows are tensors of their own."""
    windows = torch.tensor([1.0, 2.0, 3.0]).unfold(0, 2, 1)
    assert torch.slice_scatter(windows, windows[1:], 0, 0, 1).tolist() == [[2, 3], [3, 3]]
    assert torch.slice_scatter(windows.contiguous(), windows[1:], 0, 0, 1).tolist() == [[2, 3], [2, 3]]


def test_numpy_forbids_to_resize_a_tensors_storage_for_good() -> None:
    """Why `array_over` does not use it: neither results nor the caller's inputs could be resized after a call."""
    tensor = torch.zeros(3)
    tensor.numpy()
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(5)


def test_export_records_an_encoder_layer_operator_by_operator() -> None:
    """Why `zeroing_padding` hooks the layers: eager PyTorch fills the padding with zeros, a recorded run does not."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1).eval()
    x, mask = torch.randn(1, 3, 8), torch.tensor([[False, False, True]])
    with torch.no_grad():
        program = torch.export.export(encoder, (x,), {"src_key_padding_mask": mask}, strict=False)
        assert not any("encoder_layer_fwd" in str(node.target) for node in program.graph.nodes)
        assert (encoder(x, src_key_padding_mask=mask)[0, 2] == 0).all()
        assert (program.module()(x, src_key_padding_mask=mask)[0, 2] != 0).any()


def test_a_module_has_the_tables_of_hooks_that_has_hooks_reads() -> None:
    module = nn.Linear(1, 1)
    assert not has_hooks(module)
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *_: None)
        assert has_hooks(module)
        handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert has_hooks(module)
    handle.remove()
    assert not has_hooks(module)
