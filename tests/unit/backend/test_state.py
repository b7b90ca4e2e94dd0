"""Weights, mutation, randomness, autograd and threads."""

import copy
import re
import threading
import tracemalloc

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same, check


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


def _inplace(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 3 for name, value in model.state_dict().items()})


def _assign(model: nn.Module) -> None:
    model.load_state_dict({name: value * 3 for name, value in model.state_dict().items()}, assign=True)


def _data_inplace(model: nn.Module) -> None:
    model[0].weight.data.add_(1)


def _data_swap(model: nn.Module) -> None:
    model[2].weight.data = torch.randn(3, 12)


def _replace(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.randn(12, 6))


def _data_turned(model: nn.Module) -> None:
    """Changes the last row of a non-contiguous weight."""
    weight = model[2].weight
    if weight.is_contiguous():
        weight.data = torch.randn(12, 3).t()
    else:
        weight.data[-1].mul_(3)


def _numpy(model: nn.Module) -> None:
    model[0].bias.detach().numpy()[:] += 7


CHANGES = [_inplace, _load, _assign, _data_inplace, _data_swap, _data_turned, _replace, _numpy]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("grad", [False, True])
def test_changed_weight_is_never_served_stale(change, grad: bool) -> None:
    model, x = net(), torch.randn(4, 6)
    compiled = tov.compile(model)
    with torch.set_grad_enabled(grad):
        assert_same(compiled(x), model(x))
        for _ in range(3):
            before = model(x).clone()
            change(model)
            assert not torch.allclose(before, model(x))
            assert_same(compiled(x), model(x))


def test_weight_that_changes_all_the_time() -> None:
    model, x = net(), torch.randn(4, 6)
    compiled = tov.compile(model)
    with torch.no_grad():
        for _ in range(12):
            _inplace(model)
            assert_same(compiled(x), model(x))
    assert any("passed at each call" in note for note in compiled.report.to_dict()["notes"])
    assert compiled.report.summary.coverage == 1.0


def test_replaced_weights_are_freed() -> None:
    import gc
    import weakref

    model, x = net(), torch.randn(4, 6)
    compiled = tov.compile(model)
    with torch.no_grad():
        compiled(x)
        old = weakref.ref(model[0].weight)
        _assign(model)
        compiled(x)
    gc.collect()
    assert old() is None


def test_repeated_layers_after_a_graph_break() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.linear(x))
            torch._dynamo.graph_break()
            return x + 1

    model = nn.Sequential(*[Block() for _ in range(5)]).eval()
    compiled = tov.compile(model)
    x = torch.randn(2, 6)
    with torch.no_grad():
        for _ in range(3):
            assert_same(compiled(x), model(x))
        model[3].linear.weight.add_(0.5)
        assert_same(compiled(x), model(x))
    summary = compiled.report.summary
    assert summary.graph_breaks >= 1
    assert all(re.search(r"test_state\.py:\d+$", b["where"]) for b in compiled.report.to_dict()["graph_breaks"])


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model, x = net(), torch.randn(4, 6)
        compiled = tov.compile(model)
        assert_same(compiled(x), model(x))
        model[0].weight.mul_(2)
        assert_same(compiled(x), model(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(mode) -> None:
    model, x = net(), torch.randn(4, 6)
    compiled = tov.compile(model)
    with mode():
        got, expected = compiled(x), model(x)
        assert_same(got, expected)
        assert got.requires_grad == expected.requires_grad
    assert compiled.report.summary.coverage == 1.0


def test_gradients_equal_eager() -> None:
    model, x = net(), torch.randn(4, 6, requires_grad=True)
    twin, y = copy.deepcopy(model), x.detach().clone().requires_grad_()
    compiled = tov.compile(model)
    compiled(x).square().sum().backward()
    twin(y).square().sum().backward()
    assert_same(x.grad, y.grad)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same(a.grad, b.grad)


def test_a_training_loop_learns_as_eager_does() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1))
    twin = copy.deepcopy(model)
    compiled = tov.compile(model)
    x, target = torch.randn(32, 6), torch.randn(32, 1)
    for call, params in ((compiled, model), (twin, twin)):
        optimizer = torch.optim.SGD(params.parameters(), lr=0.05)
        for _ in range(6):
            optimizer.zero_grad()
            nn.functional.mse_loss(call(x), target).backward()
            optimizer.step()
    for (name, a), (_, b) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_input_mutation() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y[0] = 5
        return x * y

    compiled = tov.compile(model)
    x, y = torch.ones(3), torch.ones(3)
    x2, y2 = x.clone(), y.clone()
    assert_same(compiled(x, y), model(x2, y2))
    assert_same([x, y], [x2, y2])


def test_buffer_mutation() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return x + self.steps

    model, twin = Counter(), Counter()
    compiled = tov.compile(model)
    for _ in range(6):
        assert_same(compiled(torch.ones(3)), twin(torch.ones(3)))
    assert_same(model.steps, twin.steps)


def test_random_operators_follow_torchs_generator() -> None:
    model = lambda x: x * torch.rand_like(x) + torch.randn(3)
    compiled = tov.compile(model, options={"min_partition_us": 0})
    x = torch.ones(3)
    compiled(x)
    torch.manual_seed(7)
    got = compiled(x)
    torch.manual_seed(7)
    assert_same(got, model(x))
    assert compiled.report.fallback_counts() == {"unsupported_op": 2}


def test_dropout_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.ReLU()).train()
    compiled = tov.compile(model)
    x = torch.randn(4, 6)
    with torch.no_grad():
        compiled(x)
        torch.manual_seed(3)
        got = compiled(x)
        torch.manual_seed(3)
        assert_same(got, model(x))
        assert not torch.equal(compiled(x), compiled(x))
        compiled.eval()
        assert_same(compiled(x), model(x))


def test_batch_norm_switches_with_the_mode() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    twin = copy.deepcopy(model)
    compiled = tov.compile(model)
    x = torch.randn(3, 2, 8, 8)
    with torch.no_grad():
        for mode in (True, True, False, True, False):
            model.train(mode)
            twin.train(mode)
            assert_same(compiled(x), twin(x))
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        assert_same(a, b)


def test_answers_are_not_overwritten_by_later_calls() -> None:
    model = net()
    for dynamic in (False, True):
        compiled = tov.compile(model, dynamic=dynamic)
        inputs = [torch.randn(4, 6) for _ in range(5)]
        with torch.no_grad():
            answers = [compiled(x) for x in inputs]
            for x, answer in zip(inputs, answers, strict=True):
                assert_same(answer, model(x))


def test_answers_are_not_copied() -> None:
    """By default OpenVINO's Python binding copies all outputs to NumPy arrays as well."""
    compiled, x = tov.compile(torch.relu), torch.randn(1_000_000)
    with torch.inference_mode():
        compiled(x)
        tracemalloc.start()
        try:
            compiled(x)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # NumPy's memory is traced, torch's is not.
    assert peak < 1_000_000


def test_input_is_not_written_to() -> None:
    x = torch.randn(4, 6)
    kept = x.clone()
    compiled = tov.compile(net())
    with torch.no_grad():
        compiled(x).add_(100)
        compiled(x)
    assert torch.equal(x, kept)


def test_eight_threads() -> None:
    model = net()
    compiled = tov.compile(model)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            with torch.no_grad():
                for i in range(40):
                    x = torch.randn(1 + (seed + i) % 3, 6, generator=generator)
                    assert_same(compiled(x), model(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert compiled.report.fallback_counts() == {}
    assert compiled.report.summary.coverage == 1.0


def test_shared_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    model = Tied()
    compiled = check(model, torch.randint(0, 10, (2, 3)))
    with torch.no_grad():
        model.embed.weight.mul_(2)
    check(model, torch.randint(0, 10, (2, 3)), compiled=compiled)
