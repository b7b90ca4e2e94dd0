"""The digest of a model: the same for the same model everywhere, another for anything that changes an answer."""

import collections
import dataclasses
import enum
import functools
import importlib.util
import itertools
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.cache.fingerprint import Fingerprint, fingerprint

NAMES = itertools.count()


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Imports a text as a module of its own, as a worker does that has unpacked an archive."""
    made: list[str] = []

    def load(text: str, name: str = "", folder: str = "") -> types.ModuleType:
        name = name or f"user_model_{next(NAMES)}"
        path = tmp_path / (folder or name) / f"{name.rpartition('.')[2]}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        made.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in made:
        sys.modules.pop(name, None)


def code(model: Any) -> str:
    found = fingerprint(model)
    assert found.unknown == (), found.unknown
    return found.code


MODEL = """
import functools
import torch
from torch import nn
SCALE = 2.0
TABLE = {"a": [1, 2]}
def helper(x, bias=1.0, *, gain=3.0):
    def inner(y):
        return y * 5.0
    return inner(x) * gain + bias
def outer(factor):
    def forward(x):
        return x * factor
    return forward
class Base(nn.Module):
    LEVEL = 7
    def middle(self, x):
        return x + 11.0
    @property
    def slope(self):
        return 13.0
    @staticmethod
    def still(x):
        return x * 17.0
    @classmethod
    def ofclass(cls, x):
        return x * 19.0
class Child(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 23.0
class Net(Base):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.child = Child()
        self.steps = 29
        self.config = {"act": "relu", "sizes": (31, 37)}
        self.register_buffer("offset", torch.zeros(6), persistent=False)
        self.closed = outer(41.0)
        self.part = functools.partial(helper, gain=43.0)
    def forward(self, x, flag=47.0):
        x = self.closed(self.part(self.middle(self.first(x))))
        x = helper(x) * SCALE + self.slope + TABLE["a"][0] + self.offset
        return self.ofclass(self.still(self.child(x))) * 53.0 + flag
"""

# Each names the text that is changed, and by what.
CHANGES = {
    "constant in forward": ("* 53.0", "* 53.5"),
    "default argument": ("flag=47.0", "flag=47.5"),
    "default of a helper": ("bias=1.0", "bias=1.5"),
    "keyword default of a helper": ("gain=3.0", "gain=3.5"),
    "value in a closure": ("outer(41.0)", "outer(41.5)"),
    "argument of a partial": ("gain=43.0", "gain=43.5"),
    "global": ("SCALE = 2.0", "SCALE = 2.5"),
    "inside a global": ("[1, 2]", "[1, 3]"),
    "constant of a nested function": ("y * 5.0", "y * 5.5"),
    "operator in a nested function": ("y * 5.0", "y + 5.0"),
    "method of a base class": ("x + 11.0", "x + 11.5"),
    "attribute of a class": ("LEVEL = 7", "LEVEL = 8"),
    "property": ("return 13.0", "return 13.5"),
    "static method": ("x * 17.0", "x * 17.5"),
    "class method": ("x * 19.0", "x * 19.5"),
    "constant of a child": ("* 23.0", "* 23.5"),
    "function of a child": ("torch.relu(x)", "torch.tanh(x)"),
    "int attribute": ("steps = 29", "steps = 30"),
    "str in a dict": ('"relu"', '"gelu"'),
    "tuple in a dict": ("(31, 37)", "(31, 38)"),
    "the buffer's existence": ('self.register_buffer("offset", torch.zeros(6), persistent=False)', "self.offset = 0"),
    "persistence of a buffer": (", persistent=False", ""),
    "order of operands": ("y * 5.0", "5.0 * y"),
    "sign of zero": ("x + 11.0", "x + -0.0"),
    "int for float": ("x + 11.0", "x + 11"),
    "bool for int": ("steps = 29", "steps = True"),
    "base class": ("class Child(nn.Module)", "class Child(nn.Identity)"),
}


def test_a_model_built_twice(load: Callable[..., Any]) -> None:
    module = load(MODEL)
    assert code(module.Net()) == code(module.Net())


def test_other_name_and_other_folder_of_the_file(load: Callable[..., Any]) -> None:
    found = {
        code(load(MODEL, "tmp_0123abcd", "first").Net()),
        code(load(MODEL, "model", "second").Net()),
        code(load("\n\n# A comment.\n" + MODEL, "other.model", "a/b/c").Net()),
    }
    assert len(found) == 1


def test_two_processes_with_and_without_byte_code_on_disk(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "written.py").write_text(MODEL)
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import written
from torchserve_openvino.cache.fingerprint import fingerprint
print(fingerprint(written.Net()).code)
"""
    found = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "a")],
            capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed, "PATH": ""},
        )  # fmt: skip
        found.add(done.stdout.strip())
    assert list((tmp_path / "a" / "__pycache__").iterdir())
    assert len(found) == 1


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_is_another(load: Callable[..., Any], change: tuple[str, str]) -> None:
    old, new = change
    assert MODEL.count(old) == 1
    assert code(load(MODEL).Net()) != code(load(MODEL.replace(old, new)).Net())


def changed_by(change: Callable[[nn.Module], Any], make: Callable[[], nn.Module] | None = None) -> bool:
    first, second = (make or net)(), (make or net)()
    assert code(first) == code(second)
    change(second)
    return code(first) != code(second)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        collections.OrderedDict(a=nn.Linear(4, 4), b=nn.ReLU(), c=nn.Linear(4, 4), d=nn.Dropout(0.5))
    ).eval()


def test_training_flag_of_a_child() -> None:
    assert changed_by(lambda m: m.d.train())


def test_a_forward_hook() -> None:
    assert changed_by(lambda m: m.b.register_forward_hook(lambda m, args, out: out * 2))
    assert changed_by(lambda m: m.b.register_forward_pre_hook(lambda m, args: args))


def test_forward_of_an_instance() -> None:
    assert changed_by(lambda m: setattr(m.b, "forward", lambda x: x * 2))
    assert changed_by(lambda m: setattr(m.b, "forward", types.MethodType(lambda self, x: x * 2, m.b)))


def test_order_class_and_settings_of_children() -> None:
    def swap(m: nn.Module) -> None:
        m._modules["b"] = m._modules.pop("b")

    assert changed_by(swap)
    assert changed_by(lambda m: setattr(m, "b", nn.LeakyReLU()))
    assert changed_by(lambda m: setattr(m.b, "inplace", True))
    assert changed_by(lambda m: setattr(m.d, "p", 0.25))


def test_a_dtype_a_device_and_a_size_as_attributes() -> None:
    for value in (torch.float16, torch.device("meta"), torch.Size([2]), torch.channels_last, slice(1, 2), 1j, b"x"):
        assert changed_by(lambda m, value=value: setattr(m, "extra", value))


def test_an_array_and_a_plain_tensor_as_attributes() -> None:
    def make(value: Any) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            model = net()
            model.extra = value()
            return model

        return made

    assert changed_by(lambda m: m.extra.add_(1), make(lambda: torch.zeros(5000)))
    assert changed_by(lambda m: m.extra[4000:4001].add_(1e-6), make(lambda: torch.zeros(5000)))
    assert changed_by(lambda m: m.extra.__setitem__(2500, 1), make(lambda: torch.zeros(5000).numpy()))


def test_gradients_and_parameters_of_autograd_do_not_count_as_code() -> None:
    model = net()
    before = fingerprint(model)
    model(torch.randn(2, 4)).sum().backward()
    assert fingerprint(model) == before


# --- values of every kind ---------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a


class Both(Slotted):
    def __init__(self, a: Any, c: Any = 0) -> None:
        super().__init__(a)
        self.c = c


@dataclasses.dataclass
class Config:
    width: int = 3
    extra: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    width: int = 3


class Mode(enum.Enum):
    ONE = 1.0
    TWO = 2.0


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


Pair = collections.namedtuple("Pair", "a b")


@functools.lru_cache
def cached(x: float) -> float:
    return x * 2


def twice(x: float) -> float:
    return x * 2


def thrice(x: float) -> float:
    return x * 3


class Caller:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def run(self, x: float) -> float:
        return x * self.factor


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "slots": (Slotted(1), Slotted(2)),
    "slots and dict": (Both(1, 2), Both(1, 3)),
    "slots of a base": (Both(1, 2), Both(2, 2)),
    "dataclass": (Config(3), Config(4)),
    "dataclass inside": (Config(3, Config(1)), Config(3, Config(2))),
    "frozen dataclass": (Frozen(3), Frozen(4)),
    "enum": (Mode.ONE, Mode.TWO),
    "int enum": (Number.ONE, Number.TWO),
    "int enum and int": (Number.ONE, 1),
    "namedtuple": (Pair(1, 2), Pair(1, 3)),
    "namedtuple and tuple": (Pair(1, 2), (1, 2)),
    "list and tuple": ([1, 2], (1, 2)),
    "nested or flat": ([[1], 2], [[1, 2]]),
    "lambda": (lambda x: x * 2, lambda x: x * 3),
    "function": (twice, thrice),
    "partial": (functools.partial(twice, 1), functools.partial(twice, 2)),
    "function of a partial": (functools.partial(twice, 1), functools.partial(thrice, 1)),
    "bound method": (Caller(1).run, Caller(2).run),
    "callable object": (Caller(1), Caller(2)),
    "cache": (cached, functools.lru_cache(thrice)),
    "set": ({1, 2}, {1, 3}),
    "dict order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "None and False": (None, False),
    "text and bytes": ("1", b"1"),
    "number and text": (1, "1"),
    "floats": (1.0, 1.0000000000000002),
    "zeros": (0.0, -0.0),
    "torch function": (torch.relu, torch.tanh),
    "functional": (nn.functional.relu, nn.functional.silu),
    "operator": (torch.ops.aten.relu.default, torch.ops.aten.tanh.default),
    "class": (nn.ReLU, nn.Tanh),
    "simple namespace": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    "deque": (collections.deque([1]), collections.deque([2])),
    "long text": ("a" * 5000 + "b", "a" * 5000 + "c"),
}


def holding(value: Any) -> nn.Module:
    model = net()
    model.extra = value
    return model


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_values_that_differ(pair: tuple[Any, Any]) -> None:
    first, second = (code(holding(value)) for value in pair)
    assert first != second
    assert first == code(holding(pair[0])) and second == code(holding(pair[1]))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PLAIN, PLAIN)
def test_any_two_plain_values(a: Any, b: Any) -> None:
    import copy

    module = nn.Module()
    digests = []
    for value in (a, b, copy.deepcopy(a)):
        module.extra = value
        digests.append(fingerprint(module).code)
    assert digests[0] == digests[2]
    # repr tells all of these apart, and the order of a dictionary.
    assert (digests[0] == digests[1]) == (repr(a) == repr(b))


def test_cycles_end() -> None:
    model = net()
    model.__dict__["me"] = model
    model.__dict__["ring"] = ring = [1]
    ring.append(ring)
    first, second = Config(1), Config(2)
    first.extra, second.extra = second, first
    model.extra = first
    assert code(model) == code(model)
    second.width = 9
    changed = code(model)
    second.width = 2
    assert code(model) != changed


def test_a_recursive_function_ends(load: Callable[..., Any]) -> None:
    text = "def a(x, n):\n    return b(x, n)\ndef b(x, n):\n    return x if n == 0 else a(x * 2, n - 1)\n"
    assert code(load(text).a) == code(load(text).a) != code(load(text.replace("x * 2", "x * 3")).a)


def test_locks_and_loggers_do_not_count() -> None:
    import logging

    model = holding([threading.Lock(), threading.RLock(), logging.getLogger("a")])
    assert fingerprint(model).unknown == ()


STANDARD: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2)),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "embedding": lambda: nn.EmbeddingBag(4, 4),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)),
    "lists": lambda: nn.ModuleList([nn.ModuleDict({"a": nn.GELU()}), nn.ParameterList([torch.ones(2)])]),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "lazy": lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Softmax(-1), nn.PReLU()),
    "lstm": lambda: nn.LSTM(4, 4),
}


@pytest.mark.parametrize("make", STANDARD.values(), ids=STANDARD)
def test_modules_of_torch_are_known(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    first = fingerprint(make())
    torch.manual_seed(0)
    assert fingerprint(make()) == first
    assert first.unknown == ()


def test_a_transformers_model_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=20
    )
    first = code(transformers.BertModel(config).eval())
    assert first == code(transformers.BertModel(config).eval())
    config.layer_norm_eps = 1e-3
    assert first != code(transformers.BertModel(config).eval())


# --- code that is reached by other ways -------------------------------------------------------------------------


def variants(load: Callable[..., Any], text: str, old: str, new: str, make: str = "Net") -> list[Fingerprint]:
    """Fingerprints of a text's model, and of the same with one thing changed, loaded under one name."""
    assert text.count(old) >= 1
    found = [fingerprint(getattr(load(each), make)()) for each in (text, text, text.replace(old, new))]
    assert found[0] == found[1]
    return found[1:]


def tell_apart(found: list[Fingerprint]) -> bool:
    """Whether two models can't be taken for each other: other digests, or one that is known to say too little."""
    first, second = found
    return first.code != second.code or first.weights != second.weights or bool(first.unknown and second.unknown)


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


@pytest.mark.parametrize("length", [50, 400])
def test_a_long_chain_of_functions(load: Callable[..., Any], length: int) -> None:
    fingerprint(load(chain(length)).Net())


def test_deeply_nested_modules_and_lists() -> None:
    nested: list[Any] = []
    for _ in range(2000):
        nested = [nested]
    fingerprint(holding(nested))


# --- weights ----------------------------------------------------------------------------------------------------


def test_a_text_that_raises_does_not_stop_the_model() -> None:
    class Rude:
        __slots__ = ()

        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert fingerprint(holding(Rude())).unknown


def weights(model: nn.Module) -> str:
    return fingerprint(model).weights


def with_buffer(tensor: torch.Tensor, persistent: bool = True) -> nn.Module:
    model = nn.Module()
    model.register_buffer("b", tensor, persistent=persistent)
    return model


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool,
          torch.complex64, torch.uint8, torch.float8_e4m3fn]  # fmt: skip


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_counts_by_content(dtype: torch.dtype, persistent: bool) -> None:
    zeros, ones = (with_buffer(torch.full((3, 2), value).to(dtype), persistent) for value in (0.0, 1.0))
    assert weights(zeros) == weights(with_buffer(torch.zeros(3, 2).to(dtype), persistent)) != weights(ones)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_byte_of_any_weight(data: st.DataObject) -> None:
    model = net()
    before = weights(model)
    name, tensor = data.draw(st.sampled_from(sorted(model.named_parameters(), key=lambda pair: pair[0])))
    raw = tensor.detach().view(-1).view(torch.uint8)
    place, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
    raw[place] ^= 1 << bit
    assert weights(model) != before, name
    raw[place] ^= 1 << bit
    assert weights(model) == before


def test_shape_dtype_strides_and_names_count() -> None:
    base = torch.arange(6.0)
    found = {
        weights(with_buffer(base.clone())),
        weights(with_buffer(base.reshape(2, 3))),
        weights(with_buffer(base.reshape(3, 2))),
        weights(with_buffer(base.reshape(2, 3).t().contiguous().t())),
        weights(with_buffer(base.view(torch.int32))),
    }
    assert len(found) == 5
    other = nn.Module()
    other.register_buffer("c", base.clone())
    assert weights(other) not in found


def test_tensors_that_are_not_contiguous_count_by_what_they_show() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert weights(with_buffer(whole[:, :2])) == weights(with_buffer(whole[:, :2]))
    seen = weights(with_buffer(whole[:, :2]))
    changed = whole.clone()
    changed[2, 3] = 100
    assert weights(with_buffer(changed[:, :2])) == seen
    changed[2, 1] = 100
    assert weights(with_buffer(changed[:, :2])) != seen
    assert weights(with_buffer(torch.ones(1).expand(4))) != weights(with_buffer(torch.zeros(1).expand(4)))


def test_two_views_of_one_storage_do_not_hide_each_other() -> None:
    def model(data: torch.Tensor) -> nn.Module:
        made = nn.Module()
        made.register_buffer("a", data[:2])
        made.register_buffer("b", data[:3])
        return made

    assert weights(model(torch.tensor([1.0, 2, 3]))) != weights(model(torch.tensor([1.0, 2, 4])))


def test_tied_weights() -> None:
    def tied(value: float) -> nn.Module:
        model = nn.Module()
        model.a = nn.Linear(3, 3, bias=False)
        nn.init.constant_(model.a.weight, value)
        model.b = nn.Linear(3, 3, bias=False)
        model.b.weight = model.a.weight
        return model

    assert weights(tied(1)) == weights(tied(1)) != weights(tied(2))
    untied = tied(1)
    untied.b.weight = nn.Parameter(torch.full((3, 3), 2.0))
    assert weights(untied) != weights(tied(1))


def test_empty_tensors() -> None:
    sizes = [(0,), (0, 3), (3, 0)]
    found = {weights(with_buffer(torch.empty(size))) for size in sizes}
    assert len(found) == len(sizes)
    two = nn.Module()
    two.register_buffer("a", torch.empty(0))
    two.register_buffer("b", torch.empty(0))
    assert weights(two) == weights(two)


def unusual() -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "csr": lambda: torch.eye(3).to_sparse_csr(),
        "meta": lambda: torch.empty(3, device="meta"),
        "conj": lambda: torch.tensor([1 + 2j]).conj(),
        "neg": lambda: torch.tensor([1 + 2j]).conj().imag,
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }


@pytest.mark.parametrize("make", unusual().values(), ids=unusual())
@pytest.mark.parametrize("place", ["buffer", "attribute"])
def test_unusual_tensors_do_not_stop_the_model(make: Callable[[], torch.Tensor], place: str) -> None:
    fingerprint(with_buffer(make()) if place == "buffer" else holding(make()))


def test_content_of_a_sparse_attribute() -> None:
    first, second = (fingerprint(holding(torch.full((3,), value).to_sparse())) for value in (1.0, 2.0))
    assert tell_apart([first, second])


class Inner(nn.Module):
    def __init__(self, value: float, kind: str) -> None:
        super().__init__()
        if kind == "buffer":
            self.register_buffer("w", torch.full((3,), value))
        else:
            self.w = nn.Parameter(torch.full((3,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("how", ["closure", "bound method", "list", "partial", "object"])
def test_weights_of_modules_that_are_not_registered(kind: str, how: str) -> None:
    def made(value: float) -> Any:
        inner = Inner(value, kind)
        if how == "closure":
            return lambda x: inner(x)
        if how == "bound method":
            return inner.forward
        if how == "partial":
            return functools.partial(inner)
        return holding([inner] if how == "list" else types.SimpleNamespace(inner=inner))

    assert tell_apart([fingerprint(made(1.0)), fingerprint(made(2.0))])


# --- what can't be described ------------------------------------------------------------------------------------


class Opaque:
    """Without attributes, slots or a text."""

    __slots__ = ()


def test_the_unknown_is_named() -> None:
    found = fingerprint(holding({"deep": [Opaque()]}))
    assert len(set(found.unknown)) == 1 and "extra['deep'][0]" in found.unknown[0] and "Opaque" in found.unknown[0]
    assert "generator" in fingerprint(holding(i for i in [1])).unknown[0]
    assert fingerprint(holding(torch.Generator())).unknown


def test_a_model_with_something_unknown_is_traced_and_still_takes_its_partitions(tmp_path: Path) -> None:
    options = {"model_caching": True, "cache_dir": str(tmp_path / "c")}
    x = torch.randn(2, 4)
    for process in range(2):
        torch.compiler.reset()
        model = holding(Opaque())
        compiled = tov.compile(model, options=options).freeze()
        with torch.no_grad():
            for _ in range(3):
                assert_same(compiled(x), model(x))
        cache = compiled.report.to_dict()["cache"]
        assert any("Opaque" in reason for reason in cache["refused"])
        assert cache["traces"] == 1 and cache["calls"] == {"hits": 0, "misses": 0}
        assert (cache["hits"], cache["imports"], cache["compiles"]) == ((0, 0, 1) if process == 0 else (1, 1, 0))
