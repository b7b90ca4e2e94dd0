"""Pins what `backend/_torch_private.py` takes from torch 2.13's private modules."""

import inspect

import torch
from torch import nn

from torchserve_openvino.backend._torch_private import python_implementation


def run_backend(model, *inputs, compiler=None):
    """Compiles with a backend that hands every lowered graph to ``compiler``."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def keep(gm, example_inputs):
        if compiler is not None:
            compiler(gm, example_inputs)
        return make_boxed_func(gm.forward)

    graphs = []

    def backend(gm, example_inputs):
        graphs.append((gm, example_inputs))
        return aot_autograd(fw_compiler=keep)(gm, example_inputs)

    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(*inputs)
    return graphs


def test_the_tested_version() -> None:
    assert torch.__version__.startswith("2.13."), "the private names below were read in torch 2.13"


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
    assert len(linears) < 3


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
    """Why `WeightWatch` looks at pointers and sampled bytes as well."""
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
    """Why `ops/fast_paths.py` brings its own."""
    kernels = [
        torch.ops.aten._transformer_encoder_layer_fwd.default,
        torch.ops.aten._native_multi_head_attention.default,
    ]
    assert not torch._decomp.get_decompositions(kernels)


def test_reading_a_tree_may_import_modules_for_two_kinds_of_container() -> None:
    """Why `backend/plain_tree.py` refuses them."""
    from torch.utils import _pytree as pytree

    assert "import_module" in inspect.getsource(pytree.enum_object_hook)
    assert "import_module" in inspect.getsource(pytree._defaultdict_deserialize)
    spec = pytree.tree_flatten({"a": (1, [2])})[1]
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_dynamo_takes_zero_and_minus_zero_for_the_same_input() -> None:
    """A wrong answer of torch.compile's own that no backend can see."""
    compiled = torch.compile(lambda x, s: x / s, backend="eager", dynamic=False)
    assert compiled(torch.ones(1), 0.0) == compiled(torch.ones(1), -0.0) == float("inf")


def test_a_custom_operator_keeps_its_python_function() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.library.custom_op("contract::twice", twice, mutates_args=())
    assert python_implementation(torch.ops.contract.twice.default) is twice
    assert python_implementation(torch.ops.aten.relu.default) is None


def test_the_tracer_tells_constants_from_what_it_follows() -> None:
    from torchserve_openvino.backend._torch_private import is_traced

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
    """Why `backend/convert_ts.py` traces in a thread of its own: AOTAutograd's first call runs under such a mode."""
    from torch.utils._python_dispatch import TorchDispatchMode

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
    """What `backend/export_bind.py` and `backend/module_state.py` rely on."""

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


def watched(function, observer, **kwargs):
    from torchserve_openvino.backend._torch_private import watch_frames

    compiled = torch.compile(function, backend="eager", dynamic=False, isolate_recompiles=True, **kwargs)
    watch_frames(compiled, observer)
    return compiled


class Observer:
    def __init__(self) -> None:
        self.told = []

    def compiled(self, fact) -> None:
        self.told.append(("compiled", fact.where.rpartition("(")[2], fact.side_effects))

    def broke(self, fact) -> None:
        self.told.append(("broke", fact.where))

    def lost(self, frame, first) -> None:
        self.told.append(("lost", frame.is_break, first))


def test_dynamo_tells_what_becomes_of_each_frame() -> None:
    def in_a_loop(x):
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    observer = Observer()
    compiled = watched(in_a_loop, observer)
    for _ in range(2):
        compiled(torch.ones(2))
    assert observer.told == [("lost", True, True), ("lost", True, False)]
    torch.compiler.reset()
    compiled(torch.ones(2))
    assert observer.told[2:] == [("lost", True, True)]


def test_dynamo_tells_side_effects_of_a_frame() -> None:
    class Keeping(nn.Module):
        def forward(self, x):
            self.last = x + 1
            return self.last

    class Pure(nn.Module):
        def forward(self, x):
            return [x + 1]

    found = []
    for model in (Keeping(), Pure()):
        observer = Observer()
        watched(model, observer)(torch.ones(2))
        found.append(observer.told)
    assert found == [[("compiled", "forward)", ("L['self']",))], [("compiled", "forward)", ())]]


def test_an_error_of_the_backend_is_the_frames() -> None:
    """`watch_frames` turns it into a frame that runs in eager; nothing of the frame ran before."""
    from torchserve_openvino.backend._torch_private import watch_frames

    def failing(gm, example_inputs):
        raise ValueError("closed")

    observer, calls = Observer(), []

    def model(x):
        return x + 1

    compiled = torch.compile(model, backend=failing)
    watch_frames(compiled, observer)
    calls.append(compiled(torch.ones(2)))
    assert observer.told == [("lost", False, True)] and calls[0].tolist() == [2, 2]


def test_the_region_of_compiled_code_belongs_to_the_process() -> None:
    """Why `_Watch` sets it again: a thread meets that of another thread's model. Once this fails, it need not."""
    import threading

    from torch._C._dynamo import eval_frame

    seen = []
    before = eval_frame.set_eval_frame_isolate_recompiles_id(77)
    thread = threading.Thread(target=lambda: seen.append(eval_frame.get_eval_frame_isolate_recompiles_id()))
    thread.start()
    thread.join()
    eval_frame.set_eval_frame_isolate_recompiles_id(before)
    assert seen == [77]


def test_is_compiling_belongs_to_the_process_and_is_dynamo_compiling_to_the_trace() -> None:
    """Why `backend/whole.py` asks the second."""
    seen = []

    def backend(gm, example_inputs):
        import threading

        def ask() -> None:
            seen.append((torch.compiler.is_compiling(), torch.compiler.is_dynamo_compiling()))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return gm.forward

    traced = torch.compile(lambda x: x + int(torch.compiler.is_dynamo_compiling()), backend=backend)
    assert traced(torch.zeros(1)).item() == 1
    assert seen == [(True, False)]


def test_random_numbers_of_python_are_inputs_of_the_graph() -> None:
    import random

    from torchserve_openvino.backend._torch_private import reads_values

    found = []

    def backend(gm, example_inputs):
        found.append(reads_values(gm))
        return gm.forward

    torch.compile(lambda x: x * random.randint(1, 5), backend=backend, fullgraph=True)(torch.ones(2))
    torch.compile(lambda x: x * x.sum().item(), backend=backend, fullgraph=True)(torch.ones(2))
    torch.compile(lambda x: x * 2, backend=backend, fullgraph=True)(torch.ones(2))
    assert "random" in found[0] and "read in Python" in found[1] and not found[2]


def test_dynamo_compiles_under_the_operator_count() -> None:
    from torchserve_openvino.backend._torch_modes import OperatorCount

    graphs, ops = [], []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    with OperatorCount(ops.append):
        torch.compile(lambda x: torch.sin(x) + 1, backend=backend)(torch.ones(2))
    assert len(graphs) == 1 and torch.ops.aten.sin.default in ops


def test_dynamo_traces_what_a_call_names_instead() -> None:
    """Why a compiled model inside another is the model itself (`CompiledModule.__call__`)."""

    class Other:
        def __call__(self, x):
            raise AssertionError

        def inside(self, x):
            return x * 3

        __call__._torchdynamo_inline = inside

    other = Other()
    assert torch.compile(lambda x: other(x), backend="eager", fullgraph=True)(torch.ones(1)).item() == 3


def test_exporting_runs_python_on_other_tensors_and_copies_containers() -> None:
    """What `is_exported` and `StateKeeper` rely on."""
    seen = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = [1.0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((torch.compiler.is_exporting(), type(x) is torch.Tensor))
            return x * self.items[0]

    model = Net()
    items = model.items
    torch.export.export(model, (torch.ones(2),), strict=False)
    assert seen[0] == (True, False)
    assert model.items == items and model.items is not items


def test_dispatch_modes_are_pushed_for_one_thread_but_entered_for_the_process() -> None:
    """Why `ThreadDispatchMode` pushes itself."""
    from torch.utils import _python_dispatch as dispatch

    class Nothing(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Nothing():
        assert dispatch.is_in_torch_dispatch_mode()
    mode = Nothing()
    dispatch._push_mode(mode)
    assert not dispatch.is_in_torch_dispatch_mode()
    assert dispatch._pop_mode() is mode


def test_aotautograd_runs_a_new_graph_under_a_mode_that_the_backend_keeps_to_its_thread() -> None:
    """What `keep_to_threads` changes."""
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    from torchserve_openvino.backend._torch_private import aot_autograd

    modes = []

    def compiler(gm, example_inputs):
        def run(*args):
            modes.append([type(mode) for mode in _get_current_dispatch_mode_stack()])
            return gm.forward(*args)

        return run

    compiled = torch.compile(lambda x: x + 1, backend=aot_autograd(fw_compiler=compiler))
    with torch.no_grad():
        compiled(torch.zeros(2)), compiled(torch.zeros(2))
    assert modes == [[runtime_wrappers._AnalyzeCustomOpInputOutputMode], []]


def test_dynamo_takes_recurrent_layers_only_if_it_is_allowed_to() -> None:
    """Why `kept_whole` patches `allow_rnn`, and puts kernels of its own where torch takes them apart."""
    from torch._C import DispatchKey

    lstm = nn.LSTM(2, 3)
    x = torch.randn(4, 1, 2)
    assert not run_backend(lstm, x)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        ((graph, _),) = run_backend(lstm, x)
    assert any(node.target is torch.lstm for node in graph.graph.nodes)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        kernels = getattr(torch.ops.aten, name).input.py_kernels
        assert {DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd} <= kernels.keys()


def test_settings_of_dynamo_belong_to_a_thread() -> None:
    import threading

    seen = []
    with torch._dynamo.config.patch(allow_rnn=True):
        thread = threading.Thread(target=lambda: seen.append(torch._dynamo.config.allow_rnn))
        thread.start()
        thread.join()
    assert seen == [False]


def test_an_operator_without_fake_tensors_breaks_the_graph() -> None:
    """What `kept_whole` raises where gradients are recorded."""
    from torchserve_openvino.backend._torch_kept import keep_whole, kept_whole
    from torchserve_openvino.ops.kept import STAND_INS

    keep_whole(STAND_INS)
    gru = nn.GRU(2, 3)
    x = torch.randn(4, 1, 2)
    seen = []

    def backend(gm, example_inputs):
        seen.append(gm)
        return gm.forward

    with kept_whole():
        y, _ = torch.compile(gru, backend=backend)(x)
    torch.testing.assert_close(y, gru(x)[0])
    y.sum().backward()
    assert gru.weight_hh_l0.grad is not None
    assert all(node.target is not torch.gru for gm in seen for node in gm.graph.nodes)


def test_encoders_ask_one_function_whether_a_mask_is_causal() -> None:
    """What `take_masks` replaces in a graph: by its values, which no graph has."""
    from torch.nn.modules import transformer

    source = inspect.getsource(nn.TransformerEncoder.forward) + inspect.getsource(nn.TransformerDecoder.forward)
    assert source.count("_detect_is_causal_mask(") == 2
    assert list(inspect.signature(transformer._detect_is_causal_mask).parameters) == ["mask", "is_causal", "size"]
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    assert transformer._detect_is_causal_mask(causal, None, 4) and not transformer._detect_is_causal_mask(None)
