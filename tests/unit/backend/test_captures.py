"""What Dynamo captured of a model is compiled for further options without tracing it again, each by itself."""

import copy
import weakref

import torch
from torch import nn

from helpers import assert_same
from torchserve_openvino.backend.compiled import CompiledModule
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.backend.spec import OpenAxes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 9)

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        y = self.last(self.first(x).relu())
        return y * 2 if twice else y


class Capturing:
    """Compiles one model with several options."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self._captures = model, {}

    def __call__(self, precision: str, **options: object) -> CompiledModule:
        options = {"config": {"INFERENCE_PRECISION_HINT": precision}, **options}
        return compile_with(self.model, CompileSpec(options=options, captures=self._captures)).freeze()


def traces(compiled: CompiledModule) -> int:
    return compiled.report.tracker.cache.traces


def test_a_second_precision_is_compiled_but_not_traced() -> None:
    compile, x, other = Capturing(Net().eval()), torch.randn(4, 64), torch.randn(2, 64)
    f32, bf16 = compile("f32"), compile("bf16")
    with torch.no_grad():
        for _ in range(3):
            assert_same(f32(x), compile.model(x))
            torch.testing.assert_close(bf16(x), compile.model(x), rtol=0.05, atol=0.05)
        # A shape that only the second one meets.
        torch.testing.assert_close(bf16(other), compile.model(other), rtol=0.05, atol=0.05)
        torch.testing.assert_close(bf16(x, twice=True), 2 * compile.model(x), rtol=0.05, atol=0.1)
        assert_same(f32(other), compile.model(other))
    assert (traces(f32), traces(bf16)) == (1, 2)
    for compiled, graphs in ((f32, 2), (bf16, 3)):
        summary = compiled.report.summary
        assert summary.graphs == graphs and summary.coverage == 1.0 and not compiled.report.fallbacks
    assert f32.report.summary.precision == "f32" and bf16.report.summary.precision == "bf16"


def test_what_stays_in_eager_is_reported_for_each() -> None:
    compile, x = Capturing(Net().eval()), torch.randn(4, 64)
    first, second = (compile(precision, disabled_ops=["aten.relu"]) for precision in ("f32", "bf16"))
    with torch.no_grad():
        first(x), second(x)
    assert traces(second) == 0
    for compiled in (first, second):
        assert [item.kind for item in compiled.report.fallbacks] == ["disabled_op"]
        assert compiled.report.summary.ops_on_openvino == compiled.report.summary.ops_total - 1 > 0


def test_open_sizes_are_captured_apart_from_fixed_ones() -> None:
    model = Net().eval()
    captures: dict = {}
    opened = CompileSpec(open_axes=OpenAxes({0: (0,)}), captures=captures)
    with torch.no_grad():
        for spec, graphs in ((CompileSpec(captures=captures), 3), (opened, 1), (opened, 1)):
            compiled = compile_with(model, spec).freeze()
            for rows in (2, 3, 5):
                x = torch.randn(rows, 64)
                assert_same(compiled(x), model(x))
            assert compiled.report.summary.graphs == graphs


def test_dropping_one_frees_it_and_leaves_the_other() -> None:
    compile, x = Capturing(Net().eval()), torch.randn(4, 64)
    f32, bf16 = compile("f32"), compile("bf16")
    with torch.no_grad():
        for compiled in (f32, bf16):
            compiled(x), compiled(x)
        (partition,) = f32.running
        freed = weakref.ref(partition)
        del partition
        f32.drop()
        assert freed() is None, "a route still holds what was compiled"
        torch.testing.assert_close(bf16(x), compile.model(x), rtol=0.05, atol=0.05)
        # It is compiled again if called, and still not traced again.
        assert_same(f32(x), compile.model(x))
    assert bf16.frozen == 1 and traces(f32) == 1


def test_changed_weights_are_noticed_in_a_shared_capture() -> None:
    compile, x = Capturing(Net().eval()), torch.randn(4, 64)
    first = compile("f32")
    with torch.no_grad():
        assert_same(first(x), compile.model(x))
        compile.model.last.weight.mul_(3)
        second = compile("f32")
        assert_same(second(x), compile.model(x))
        assert_same(second(x), compile.model(x))
    assert traces(second) == 0


def test_a_state_keeping_model_stays_guarded_for_each() -> None:
    class Counter(Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) + self.calls

    model = Counter().eval()
    compile, eager = Capturing(model), Net().eval()
    eager.load_state_dict(model.state_dict())
    x = torch.randn(4, 64)
    with torch.no_grad():
        for call, compiled in enumerate([compile("f32"), compile("f32")] * 3, start=1):
            assert_same(compiled(x), eager(x) + call)
            assert compiled.frozen == 0
    assert model.calls == 6


def test_a_copy_and_methods_are_captured_by_themselves() -> None:
    class Two(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x)

    model, captures = Two().eval(), {}
    compiled = compile_with(model, CompileSpec(methods=("features",), captures=captures)).freeze()
    x = torch.randn(4, 64)
    with torch.no_grad():
        assert_same(compiled(x), model(x))
        assert_same(compiled.features(x), model.features(x))
        twin = copy.deepcopy(compiled)
        twin.eager.last.weight.zero_()
        assert_same(twin(x), twin.eager(x))
        assert_same(compiled(x), model(x))
