"""Pins what this package takes from TorchScript's private interface (torch 2.13 to 2.15)."""

from pathlib import Path

import torch
from torch import nn

from torchserve_openvino.backend.upstream import _torch_script as private


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.scale = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale

    @torch.jit.export
    def other(self, x: torch.Tensor) -> torch.Tensor:
        return x


def scripted() -> torch.jit.ScriptModule:
    return torch.jit.script(Net())


def kinds(graph) -> set[str]:
    return {node.kind() for node in graph.nodes()}


def test_an_inlined_graph_is_a_copy_without_calls() -> None:
    module = scripted()
    method = private.method_of(module, "forward")
    assert {"aten::relu", "aten::add", "aten::mul"} <= kinds(private.inlined_graph(method))
    # The module's own graph keeps its call.
    assert "prim::CallMethod" in kinds(method.graph)


def test_methods_are_found_by_name() -> None:
    module = scripted()
    assert private.method_of(module, "other") is not None and private.method_of(module, "nothing") is None


def test_hooks_of_a_module_are_its_own() -> None:
    hooked = Net()

    def hook(self, x: tuple[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
        return result + 1

    assert not private.has_script_hooks(scripted())
    hooked.register_forward_hook(hook)
    assert private.has_script_hooks(torch.jit.script(hooked))


def test_nodes_have_schemas_and_sources() -> None:
    graph = private.inlined_graph(private.method_of(scripted(), "forward"))
    (relu,) = graph.findAllNodes("aten::relu")
    schema = private.parsed_schema(relu)
    assert schema.name == "aten::relu" and [each.name for each in schema.arguments] == ["self"]
    assert private.source_of(relu).startswith(f"{Path(__file__)}:")
    constants = graph.findAllNodes("prim::Constant")
    assert constants and all(private.parsed_schema(each) is None for each in constants)


def test_operators_of_the_dispatcher_are_told_from_those_of_the_interpreter() -> None:
    assert private.is_dispatched("aten::relu", "") and not private.is_dispatched("aten::__getitem__", "t")


def test_operators_that_take_the_name_of_a_file() -> None:
    assert private.opens_files("aten::save") and not private.opens_files("aten::relu")


def test_attributes_are_read_without_python() -> None:
    module = scripted()
    assert private.attribute_of(module, "scale") == 3
    module.scale = 4
    assert private.attribute_of(module, "scale") == 4


def test_sizes_of_an_archives_members(tmp_path: Path) -> None:
    scripted().save(str(tmp_path / "net.pt"))
    sizes = private.record_sizes(tmp_path / "net.pt")
    assert sizes["version"] > 0 and any(name.startswith("code/") for name in sizes)
