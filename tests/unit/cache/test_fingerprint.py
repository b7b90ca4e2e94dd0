"""A model's digest: equal for the same model in any process, different after any change that affects a result."""

import collections
import dataclasses
import enum
import functools
import importlib
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fingerprint_helpers import code, holding, net
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from torchserve_openvino.cache.identity.fingerprint import fingerprint

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

# Old and new text of each change.
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
from torchserve_openvino.cache.identity.fingerprint import fingerprint
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


class Private(Slotted):
    __slots__ = ("__hidden",)

    def __init__(self, hidden: Any) -> None:
        super().__init__(1)
        self.__hidden = hidden


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


@dataclasses.dataclass
class Annotated:
    longest: int | None = None


@dataclasses.dataclass
class AnnotatedOtherwise:
    longest: float | None = None


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
    "a private slot": (Private(1), Private(2)),
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
    "regular expression": (re.compile("a+"), re.compile("a*")),
    "flags of one": (re.compile("a"), re.compile("a", re.IGNORECASE)),
    "annotation": (int | None, float | None),
    "annotation of a field": (Annotated, AnnotatedOtherwise),
    "long text": ("a" * 5000 + "b", "a" * 5000 + "c"),
}


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
    # repr distinguishes all of these, including the order of a dictionary.
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

    found = [code(holding([threading.Lock(), threading.RLock(), logging.getLogger(name)])) for name in ("a", "b")]
    assert found[0] == found[1]


STANDARD: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2)),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "embedding": lambda: nn.EmbeddingBag(4, 4),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)),
    "lists": lambda: nn.ModuleList([nn.ModuleDict({"a": nn.GELU()}), nn.ParameterList([torch.ones(2)])]),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "other": lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Softmax(-1), nn.PReLU()),
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


def test_a_relative_import_inside_a_function_is_not_the_module_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "relative_net"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "math.py").write_text("SCALE = 2.0\n")
    (package / "model.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n"
        "    def forward(self, x):\n        from .math import SCALE\n        return x * SCALE\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module, numbers = (importlib.import_module(f"relative_net.{name}") for name in ("model", "math"))
    before = fingerprint(module.Net())
    assert not before.unknown
    monkeypatch.setattr(numbers, "SCALE", 3.0)
    assert fingerprint(module.Net()).code != before.code
