"""A model's digest covers code that is not reached through the model's own functions."""

import collections
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fingerprint_helpers import code, holding, net, tell_apart
from torch import nn

from torchserve_openvino.cache.identity.fingerprint import Fingerprint, fingerprint


def variants(
    load: Callable[..., Any], text: str, old: str, new: str, make: str = "Net", known: bool = True
) -> list[Fingerprint]:
    """Returns the fingerprints of a model before and after a change to its source text."""
    assert text.count(old) >= 1
    found = [fingerprint(getattr(load(each), make)()) for each in (text, text, text.replace(old, new))]
    assert found[0] == found[1] and (found[0].unknown == ()) is known
    return found[1:]


NET = """
import torch
from torch import nn
class Net(nn.Module):
    def forward(self, x):
        return {}
"""


def library(load: Callable[..., Any], name: str, value: str) -> types.ModuleType:
    text = f"VALUE = {value}\nGETTER = 'VALUE'\ndef scale(x):\n    return x * {value}\n"
    return load(text, name, f"{name}-{value}")


@pytest.mark.parametrize("use", ["lib.VALUE * x", "lib.scale(x)"])
def test_a_users_module_as_a_global(load: Callable[..., Any], use: str) -> None:
    found = []
    for value in ("2.0", "3.0"):
        library(load, "lib", value)
        found.append(fingerprint(load("import lib\n" + NET.format(use)).Net()))
    assert tell_apart(found)


@pytest.mark.parametrize("use", ["pack.lib.VALUE * x", "pack.lib.scale(x)"])
def test_a_users_module_below_a_package(load: Callable[..., Any], use: str) -> None:
    found = []
    for value in ("2.0", "3.0"):
        package = load("", "pack", f"pack-{value}")
        package.__path__ = []
        package.lib = library(load, "pack.lib", value)
        found.append(fingerprint(load("import pack.lib\n" + NET.format(use)).Net()))
    assert tell_apart(found)


@pytest.mark.parametrize(
    "how", ["import lib\n        return lib.scale(x)", "from lib import scale\n        return scale(x)"]
)
def test_a_users_module_imported_in_forward(load: Callable[..., Any], how: str) -> None:
    found = []
    for value in ("2.0", "3.0"):
        library(load, "lib", value)
        found.append(fingerprint(load(NET.replace("return {}", how)).Net()))
    assert tell_apart(found)


def test_what_a_try_covers(load: Callable[..., Any]) -> None:
    rest = "            z = x * 2\n        except ValueError:\n            z = 0\n        return {'z': z}"
    inside, before = f"try:\n            y = x + 1\n{rest}", f"y = x + 1\n        try:\n{rest}"
    assert tell_apart([fingerprint(load(NET.replace("return {}", each)).Net()) for each in (inside, before)])


def test_a_name_that_is_looked_up_by_text(load: Callable[..., Any]) -> None:
    found = []
    for value in ("2.0", "3.0"):
        library(load, "lib", value)
        found.append(fingerprint(load("import lib\n" + NET.format("x * getattr(lib, 'VALUE')")).Net()))
    assert tell_apart(found)


def test_an_attribute_of_a_function(load: Callable[..., Any]) -> None:
    text = "def act(x):\n    return x * act.gain\nact.gain = 2.0\n" + NET.format("act(x)")
    assert tell_apart(variants(load, text, "gain = 2.0", "gain = 3.0"))


def test_the_value_of_an_enum_member(load: Callable[..., Any]) -> None:
    text = "import enum\nclass Mode(enum.Enum):\n    A = 2.0\n" + NET.format("x * self.mode.value")
    text += "def make():\n    net = Net()\n    net.mode = Mode.A\n    return net\n"
    assert tell_apart(variants(load, text, "A = 2.0", "A = 3.0", "make"))


def test_a_method_of_an_enum(load: Callable[..., Any]) -> None:
    text = "import enum\nclass Mode(enum.Enum):\n    A = 2.0\n    def gain(self):\n        return 5.0\n"
    text += NET.format("x * self.mode.gain()")
    text += "def make():\n    net = Net()\n    net.mode = Mode.A\n    return net\n"
    assert tell_apart(variants(load, text, "return 5.0", "return 6.0", "make"))


@pytest.mark.parametrize("base", ["dict", "list", "tuple", "collections.deque", "int", "str"])
def test_a_method_of_a_subclass_of_a_builtin(load: Callable[..., Any], base: str) -> None:
    text = f"import collections\nclass Own({base}):\n    def gain(self):\n        return 5.0\n"
    text += NET.format("x * self.own.gain()")
    text += "def make():\n    net = Net()\n    net.own = Own()\n    return net\n"
    assert tell_apart(variants(load, text, "return 5.0", "return 6.0", "make"))


@pytest.mark.parametrize("base", ["dict", "list", "collections.OrderedDict"])
def test_an_attribute_of_a_subclass_of_a_builtin(load: Callable[..., Any], base: str) -> None:
    text = f"import collections\nclass Own({base}):\n    pass\n" + NET.format("x * self.own.gain")
    text += "def make():\n    net = Net()\n    net.own = Own()\n    net.own.gain = 5.0\n    return net\n"
    assert tell_apart(variants(load, text, "gain = 5.0", "gain = 6.0", "make"))


def test_content_of_a_subclass_of_deque(load: Callable[..., Any]) -> None:
    text = "import collections\nclass Own(collections.deque):\n    pass\n" + NET.format("x * self.own[0]")
    text += "def make():\n    net = Net()\n    net.own = Own([5.0])\n    return net\n"
    assert tell_apart(variants(load, text, "5.0", "6.0", "make"))


def test_tensors_in_a_deque() -> None:
    changed = torch.zeros(3000)
    changed[1500] = 1
    first, second = (fingerprint(holding(collections.deque([tensor]))) for tensor in (torch.zeros(3000), changed))
    assert tell_apart([first, second])


def test_the_factory_of_a_defaultdict() -> None:
    factories = (lambda: 2.0), (lambda: 3.0)
    first, second = (fingerprint(holding(collections.defaultdict(factory))) for factory in factories)
    assert tell_apart([first, second])


def test_an_array_of_objects() -> None:
    import numpy as np

    values = np.empty(3000, dtype=object), np.empty(3000, dtype=object)
    values[1][1500] = 5.0
    first, second = (fingerprint(holding(value)) for value in values)
    assert tell_apart([first, second])


def test_what_a_builtin_is_bound_to() -> None:
    first, second = (fingerprint(holding(torch.full((3,), value).mul)) for value in (2.0, 3.0))
    assert tell_apart([first, second])


def test_a_set_of_objects_whose_text_hides_them(load: Callable[..., Any]) -> None:
    text = "class Own:\n    gain = 5.0\n    def __repr__(self):\n        return 'own'\n" + NET.format(
        "x * min(self.own).gain"
    )
    text += "def make():\n    net = Net()\n    net.own = {Own()}\n    return net\n"
    assert tell_apart(variants(load, text, "gain = 5.0", "gain = 6.0", "make"))


def test_an_installed_class_that_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(net())
    assert before.unknown == ()
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x * 2)
    assert tell_apart([before, fingerprint(net())])


def test_a_model_whose_text_was_executed_without_a_name() -> None:
    found = []
    for factor in ("2.0", "3.0"):
        namespace: dict[str, Any] = {}
        exec(NET.format(f"x * {factor}"), namespace)
        found.append(fingerprint(namespace["Net"]()))
    assert tell_apart(found)


def test_a_class_in_main_that_is_executed_under_a_name() -> None:
    found = []
    for factor in ("2.0", "3.0"):
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(NET.format(f"x * {factor}"), namespace)
        found.append(fingerprint(namespace["Net"]()))
    assert tell_apart(found)


def test_a_hook_has_the_same_digest_in_the_next_model() -> None:
    def hooked() -> nn.Module:
        model = net()
        model.b.register_forward_hook(hook)
        return model

    assert code(hooked()) == code(hooked())


def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


def test_a_graph_module_has_its_code_in_the_digest() -> None:
    def traced(factor: float) -> nn.Module:
        return torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(), Times(factor)))

    assert code(traced(2.0)) == code(traced(2.0)) != code(traced(3.0))


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_an_exported_program_has_the_same_digest_when_it_is_exported_again() -> None:
    def exported(factor: float) -> Fingerprint:
        return fingerprint(torch.export.export(Times(factor), (torch.randn(2),)).module())

    first, again, other = exported(2.0), exported(2.0), exported(3.0)
    assert tell_apart([first, other])
    assert first == again


def chain(length: int) -> str:
    functions = [f"def f{i}(x):\n    return f{i + 1}(x) + 1\n" for i in range(length)]
    return "".join(functions) + f"def f{length}(x):\n    return x\n" + NET.format("f0(x)")


# A model whose code is too deep to be read is reported as unknown.
@pytest.mark.parametrize(("length", "known"), [(50, True), (400, False)])
def test_a_long_chain_of_functions(load: Callable[..., Any], length: int, known: bool) -> None:
    assert tell_apart(variants(load, chain(length), "return x\n", "return x * 2\n", known=known))


@pytest.mark.parametrize("depth", [20, 2000])
def test_deeply_nested_lists(depth: int) -> None:
    found = []
    for innermost in (1, 2):
        nested = [innermost]
        for _ in range(depth):
            nested = [nested]
        found.append(fingerprint(holding(nested)))
    assert tell_apart(found) and (found[0].unknown == ()) is (depth < 100)


def test_a_function_in_a_library_s_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, Any] = {"theirs": nn.functional.relu}
    monkeypatch.setattr(sys.modules[nn.ReLU.__module__], "REGISTERED", table, raising=False)
    before = fingerprint(net())
    table["mine"] = lambda x: x * 2
    first = fingerprint(net())
    table["mine"] = lambda x: x * 3
    second = fingerprint(net())
    assert tell_apart([before, first]) and tell_apart([first, second])


@pytest.mark.parametrize("text", ["eval('S')", "globals()['S']"])
def test_what_code_finds_by_a_text_is_not_known(load: Callable[..., Any], text: str) -> None:
    source = f"S = 2.0\n{NET.format(f'x * {text}')}def make():\n    return Net()\n"
    variants(load, source, "S = 2.0", "S = 3.0", "make", known=False)
