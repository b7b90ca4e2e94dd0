"""Pins what replacing calls of a handler's modules with compiled ones relies on in torch 2.13."""

import torch
from torch import nn

from torchserve_openvino.backend.upstream._torch_modes import ThreadDispatchMode, is_innermost


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


def test_a_module_has_a_place_for_what_is_called_instead() -> None:
    net, x, calls = Net().eval(), torch.ones(1, 4), []

    def instead(*args: torch.Tensor) -> torch.Tensor:
        calls.append(args)
        return net.inner._call_impl(*args)

    net.inner._compiled_call_impl = instead
    expected = net(x)
    assert len(calls) == 1
    # Dynamo traces the module's code, so the compiled code does not call the replacement either.
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    compiled = torch.compile(net, backend=backend)
    assert torch.equal(compiled(x), expected) and torch.equal(compiled(x), expected)
    assert len(calls) == 1 and len(graphs) == 1
    # It is not part of the model's state.
    assert "_compiled_call_impl" not in net.state_dict() and list(net.inner.children()) == []


def test_the_innermost_mode_is_known_by_thread() -> None:
    first, second = ThreadDispatchMode(), ThreadDispatchMode()
    assert not is_innermost(first)
    with first:
        assert is_innermost(first)
        with second:
            assert is_innermost(second) and not is_innermost(first)
        assert is_innermost(first)
    assert not is_innermost(first)


def test_a_parameter_comes_to_a_mode_as_it_is() -> None:
    seen = []

    class Watch(ThreadDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.extend(arg for arg in args if isinstance(arg, nn.Parameter))
            return func(*args, **(kwargs or {}))

    net = Net().eval()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        seen.clear()
        with mode(), Watch():
            net(torch.ones(1, 4))
        assert {id(weight) for weight in seen} == {id(weight) for weight in net.parameters()}, mode
