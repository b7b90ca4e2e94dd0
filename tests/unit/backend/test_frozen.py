"""freeze() gives the same answers without guards, only for calls that can be repeated without Dynamo."""

import threading

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_same_answers_for_every_shape(mode) -> None:
    model = net()
    compiled = tov.compile(model).freeze()
    with mode():
        for batch in (1, 2, 3, 2, 1, 3, 1):
            x = torch.randn(batch, 6)
            assert_same(compiled(x), model(x))
    assert compiled.frozen == 3
    assert compiled.report.summary.coverage == 1.0 and not compiled.report.fallbacks


def test_the_frozen_call_does_not_go_through_dynamo() -> None:
    compiled = tov.compile(net()).freeze()
    x = torch.randn(2, 6)
    with torch.no_grad():
        expected = compiled(x)
        compiled(x)
        with torch.compiler.set_stance("force_eager"):
            assert_same(compiled(x), expected)
    assert not compiled.report.fallbacks


def test_nested_inputs_and_outputs() -> None:
    class Model(nn.Module):
        def forward(self, pair, *, scale=2.0, bias=None):
            a, b = pair
            y = a * scale + b
            return {"y": y if bias is None else y + bias, "parts": [a - b, None, 3]}

    model = Model()
    compiled = tov.compile(model).freeze()
    with torch.no_grad():
        for scale in (2.0, 3.0, 2.0, 3.0):
            for bias in (None, torch.randn(4)):
                pair = (torch.randn(4), torch.randn(4))
                assert_same(compiled(pair, scale=scale, bias=bias), model(pair, scale=scale, bias=bias))
    assert compiled.frozen == 4


def test_views_mutation_and_breaks_stay_guarded() -> None:
    def view(x):
        return x.t()

    def mutation(x):
        return x.add_(1) * 2

    def broken(x):
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return x + 1

    for model in (view, mutation, broken):
        compiled = tov.compile(model).freeze()
        with torch.no_grad():
            for _ in range(3):
                x = torch.randn(2, 3)
                y = x.clone()
                assert_same(compiled(x), model(y))
                assert_same(x, y)
        assert compiled.frozen == 0


def test_same_tensor_twice_and_non_contiguous_inputs_stay_right() -> None:
    model = lambda x, y: x * 2 + y
    compiled = tov.compile(model).freeze()
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    with torch.no_grad():
        for x, y in 2 * ((a, b), (a, a), (a.t(), b), (b, a), (a, a)):
            assert_same(compiled(x, y), model(x, y))
    assert compiled.frozen == 1


def test_random_numbers_are_drawn_anew() -> None:
    compiled = tov.compile(lambda x: x + torch.rand_like(x)).freeze()
    x = torch.ones(100)
    with torch.no_grad():
        answers = {tuple(compiled(x).tolist()) for _ in range(4)}
    assert len(answers) == 4 and compiled.frozen == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_answers_are_not_overwritten_and_threads_do_not_mix(recorded: bool) -> None:
    model = net()
    compiled = tov.compile(model).freeze()
    errors: list[BaseException] = []
    with torch.no_grad():
        for size in (1, 1, 2, 2, 3, 3) if recorded else ():
            compiled(torch.randn(size, 6))

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            inputs = [torch.randn(1 + i % 3, 6, generator=generator) for i in range(30)]
            with torch.no_grad():
                answers = [compiled(x) for x in inputs]
                for x, answer in zip(inputs, answers, strict=True):
                    assert_same(answer, model(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert compiled.frozen == 3 and not compiled.guarded_reasons


class Shifted(nn.Module):
    """Adds a tensor that requires gradients; the backward pass needs no saved values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, tensor = kind, torch.ones(4)
        if kind == "parameter":
            self.shift = nn.Parameter(tensor)
        elif kind == "buffer":
            self.register_buffer("shift", tensor.requires_grad_())
        else:
            self.shifts = [tensor.requires_grad_()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.shifts[0] if self.kind == "list" else self.shift)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "list"])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
def test_gradients_are_recorded_at_every_call(backend, kind) -> None:
    compiled = tov.compile(Shifted(kind).eval(), backend=backend, options={"min_partition_us": 0}).freeze()
    for _ in range(4):
        assert compiled(torch.rand(2, 4)).requires_grad
    assert compiled.frozen == 0
    with torch.no_grad():
        answers = [compiled(torch.ones(2, 4)) for _ in range(3)]
    assert compiled.frozen == 1
    assert all(torch.equal(answer, torch.full((2, 4), 2.0)) and not answer.requires_grad for answer in answers)


def test_the_reason_names_gradients() -> None:
    compiled = tov.compile(Shifted("parameter").eval(), options={"min_partition_us": 0}).freeze()
    compiled(torch.rand(2, 4))
    assert any("torch.no_grad()" in reason for reason in compiled.guarded_reasons)


def test_what_is_left_to_pytorch_is_not_cast_by_autocast_again() -> None:
    class Exact(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                product = x @ y
            return product + 1

    model, options = Exact().eval(), {"disabled_ops": ["aten.mm"], "min_partition_us": 0}
    compiled, (x, y) = tov.compile(model, options=options), torch.randn(2, 8, 8)
    compiled.freeze()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            torch.testing.assert_close(compiled(x, y), model(x, y), rtol=1e-6, atol=1e-6)
    assert compiled.report.to_dict()


def test_a_conjugate_is_not_what_it_is_the_conjugate_of() -> None:
    def parts(z: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(z * 2)

    compiled, z = tov.compile(parts, options={"min_partition_us": 0}), torch.randn(3, dtype=torch.complex64)
    compiled.freeze()
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(z), parts(z))
        torch.testing.assert_close(compiled(z.conj()), parts(z.conj()))
        torch.testing.assert_close(compiled(z.conj().imag.sum() + z), parts(z.conj().imag.sum() + z))


class _State(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h0: torch.Tensor
        self.register_buffer("h0", torch.zeros(1, 4))
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(x, h)
        return h.tanh() - self.h0, h


@pytest.mark.parametrize("backend", ["openvino", "export"])
def test_a_state_that_begins_with_the_model_s_own_tensor_goes_on_with_others(backend: str) -> None:
    model = _State().eval()
    compiled, steps = tov.compile(model, backend=backend), torch.randn(3, 1, 4)
    compiled.freeze()
    with torch.no_grad():
        for length in (1, 1, 3, 1, 3):
            got = expected = model.h0
            for x in steps[:length]:
                (answer, got), (reference, expected) = compiled(x, got), model(x, expected)
                assert_same((answer, got), (reference, expected))


def test_a_model_without_gradients_stays_so() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 0.1))

        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.erfinv(x * self.weight)

    compiled, x = tov.compile(Model().eval()).freeze(), torch.rand(2, 4)
    for _ in range(4):
        assert not compiled(x).requires_grad
