"""Pins how torch 2.13's Dynamo treats frames, threads and modes; `backend/upstream/_torch_*.py` relies on it."""

import inspect
import random
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch._C import DispatchKey
from torch._C._dynamo import eval_frame
from torch._dynamo import config as dynamo_config
from torch._dynamo.eval_frame import make_set_enable_dynamic
from torch._functorch._aot_autograd import runtime_wrappers
from torch.fx.experimental import _config as shape_config
from torch.nn.modules import transformer
from torch.utils import _python_dispatch as dispatch

from helpers import run_backend
from torchserve_openvino.backend.upstream._torch_kept import FloatValues, constant_floats, keep_undecomposed, kept_whole
from torchserve_openvino.backend.upstream._torch_modes import OperatorCount
from torchserve_openvino.backend.upstream._torch_private import aot_autograd, reads_values, watch_frames
from torchserve_openvino.ops.opaque_ops import OPAQUE_OPS
from versions import until


def watched(function, observer, **kwargs):
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
    """`watch_frames` makes such a frame run in eager; no part of it has run by then."""

    def failing(gm, example_inputs):
        raise ValueError("closed")

    observer, calls = Observer(), []

    def model(x):
        return x + 1

    compiled = torch.compile(model, backend=failing)
    watch_frames(compiled, observer)
    calls.append(compiled(torch.ones(2)))
    assert observer.told == [("lost", False, True)] and calls[0].tolist() == [2, 2]


@until(2, 15, "each thread has its own region")
def test_the_region_of_compiled_code_belongs_to_the_process() -> None:
    """Why `_ObservedConversion` sets it again: another thread may have changed it."""
    seen = []
    before = eval_frame.set_eval_frame_isolate_recompiles_id(77)
    thread = threading.Thread(target=lambda: seen.append(eval_frame.get_eval_frame_isolate_recompiles_id()))
    thread.start()
    thread.join()
    eval_frame.set_eval_frame_isolate_recompiles_id(before)
    assert seen == [77]


def test_is_compiling_belongs_to_the_process_and_is_dynamo_compiling_to_the_trace() -> None:
    """Why `backend/capture/whole.py` calls `is_dynamo_compiling`."""
    seen = []

    def backend(gm, example_inputs):
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
    found = []

    def backend(gm, example_inputs):
        found.append(reads_values(gm))
        return gm.forward

    torch.compile(lambda x: x * random.randint(1, 5), backend=backend, fullgraph=True)(torch.ones(2))
    torch.compile(lambda x: x * x.sum().item(), backend=backend, fullgraph=True)(torch.ones(2))
    torch.compile(lambda x: x * 2, backend=backend, fullgraph=True)(torch.ones(2))
    assert "random" in found[0] and "read in Python" in found[1] and not found[2]


def test_dynamo_compiles_under_the_operator_count() -> None:
    graphs, ops = [], []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    with OperatorCount(ops.append):
        torch.compile(lambda x: torch.sin(x) + 1, backend=backend)(torch.ones(2))
    assert len(graphs) == 1 and torch.ops.aten.sin.default in ops


def test_dynamo_traces_what_a_call_names_instead() -> None:
    """Why a compiled model inside another one is traced as the original model (`CompiledModule.__call__`)."""

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
    """What `repair_aliasing_check` changes."""
    modes = []

    def compiler(gm, example_inputs):
        def run(*args):
            modes.append([type(mode) for mode in dispatch._get_current_dispatch_mode_stack()])
            return gm.forward(*args)

        return run

    compiled = torch.compile(lambda x: x + 1, backend=aot_autograd(fw_compiler=compiler))
    with torch.no_grad():
        compiled(torch.zeros(2)), compiled(torch.zeros(2))
    assert modes == [[runtime_wrappers._AnalyzeCustomOpInputOutputMode], []]


def test_dynamo_takes_recurrent_layers_only_if_it_is_allowed_to() -> None:
    """Why `kept_whole` patches `allow_rnn`, and `keep_undecomposed` replaces kernels that decompose these layers."""
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


def test_a_convolution_is_traced_for_the_sizes_of_one_of_torchs_kernels() -> None:
    """Why `kept_whole` suppresses the guards of `_select_conv_backend`: they say nothing about the result."""
    graphs = []
    compiled = torch.compile(
        nn.Conv1d(1, 2, 10, 5), backend=lambda gm, _: graphs.append(gm) or gm.forward, dynamic=True
    )
    with torch.no_grad():
        for samples in (16_000, 20_480, 20_481, 30_000):
            compiled(torch.zeros(1, 1, samples))
    assert len(graphs) == 2


def test_settings_of_dynamo_belong_to_a_thread() -> None:
    seen = []
    with torch._dynamo.config.patch(allow_rnn=True):
        thread = threading.Thread(target=lambda: seen.append(torch._dynamo.config.allow_rnn))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.mark.parametrize("dynamic", [True, False])
def test_what_dynamic_sets_at_each_call(dynamic) -> None:
    names = ("assume_static_by_default", "automatic_dynamic_shapes")

    def settings():
        return [getattr(torch._dynamo.config, name) for name in names]

    # Differs from what either of them sets.
    with torch._dynamo.config.patch(assume_static_by_default=dynamic, automatic_dynamic_shapes=True):
        with kept_whole(dynamic):
            ours = settings()
        revert = make_set_enable_dynamic(dynamic)()
        theirs = settings()
        revert()
        assert ours == theirs != settings()


def test_an_operator_without_fake_tensors_breaks_the_graph() -> None:
    """What the operators raise in `kept_whole` while gradients are recorded."""
    keep_undecomposed(OPAQUE_OPS)
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
    """What `take_masks` replaces: it reads the mask's values, which are unknown while tracing."""
    source = inspect.getsource(nn.TransformerEncoder.forward) + inspect.getsource(nn.TransformerDecoder.forward)
    assert source.count("_detect_is_causal_mask(") == 2
    assert list(inspect.signature(transformer._detect_is_causal_mask).parameters) == ["mask", "is_causal", "size"]
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    assert transformer._detect_is_causal_mask(causal, None, 4) and not transformer._detect_is_causal_mask(None)


def test_a_size_that_is_marked_stays_open_even_at_1() -> None:
    """What `_torch_sizes` relies on: it marks tensors, removes the marks, and treats a size of 1 like any other."""

    def compiled_for(oblivious: bool) -> int:
        graphs = []

        def backend(gm, example_inputs):
            graphs.append(gm)
            return gm.forward

        torch._dynamo.reset()
        model = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
        for size in (1, 4, 2):
            x = torch.rand(size, 3)
            torch._dynamo.maybe_mark_dynamic(x, (0,))
            assert {"_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking"} == set(vars(x))
            with shape_config.patch(backed_size_oblivious=oblivious):
                assert torch.equal(model(x), x + 1)
        # A tensor without marks reuses a graph.
        model(torch.rand(3, 3))
        return len(graphs)

    assert compiled_for(True) == 1 and compiled_for(False) == 2


@until(2, 15, "the check passes subclasses")
def test_aotautograds_aliasing_check_refuses_subclasses_of_tensors() -> None:
    """Why `repair_aliasing_check` replaces its dispatch: without that, each new graph fails on such an input."""
    program = """
import torch
class Image(torch.Tensor):
    pass
with torch.no_grad():
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.zeros(2).as_subclass(Image))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "returned NotImplemented" in done.stderr


def test_dynamic_makes_each_float_an_input() -> None:
    """Why `constant_floats` replaces `VariableBuilder.wrap_symfloat`, and that this function decides it."""
    seen = []

    def backend(gm, inputs):
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        seen.append(sum(isinstance(value, torch.Tensor) and value.dtype is torch.float64 for value in values))
        return gm.forward

    compiled = torch.compile(lambda x, y: x * y, dynamic=True, backend=backend)
    known: FloatValues = {}
    with constant_floats(known):
        for factor in (2.5, 2.5, 3.5, 4.5):
            compiled(torch.ones(3), factor)
    assert seen == [0, 1] and list(known.values()) == [2.5]
    torch.compiler.reset()
    compiled(torch.ones(3), 2.5)
    assert seen == [0, 1, 1]


@pytest.mark.parametrize(("captures", "graphs"), [(False, 0), (True, 1)])
def test_a_selection_in_a_loop_gives_up_the_frame_unless_it_is_captured(captures: bool, graphs: int) -> None:
    """Why `kept_whole` captures operators whose result sizes depend on values, for detectors."""
    seen = []

    def backend(gm, example_inputs):
        seen.append(gm)
        return gm.forward

    def model(x):
        parts = []
        for level in (x, x * 2):
            places = torch.where(level > 1)[0]
            parts.append(level[places].topk(min(2, places.size(0))).values)
        return torch.cat(parts)

    torch._dynamo.reset()
    x = torch.tensor([0.2, 0.7, 1.5, 3.0])
    with dynamo_config.patch(capture_dynamic_output_shape_ops=captures):
        assert torch.equal(torch.compile(model, backend=backend, dynamic=False)(x), model(x))
    assert len(seen) == graphs
