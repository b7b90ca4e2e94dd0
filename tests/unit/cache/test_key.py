"""The tables of key fields list every option, argument and field; stored entries have exactly these fields."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.backend.compiler import CompileSpec, compile_with
from torchserve_openvino.cache.identity.fingerprint import mappings_digest
from torchserve_openvino.cache.identity.key import ARGUMENTS, FIELDS, OPTIONS, digest, graph_options, make_key
from torchserve_openvino.cache.open import CacheSettings
from torchserve_openvino.cache.storage.manifest import KINDS
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config import BackendOptions
from torchserve_openvino.ops.mappings import Mappings

PLACES = {"graph", "device", "nowhere"}


def test_every_option_is_classified() -> None:
    assert {field.name for field in dataclasses.fields(BackendOptions)} == set(OPTIONS)
    assert set(OPTIONS.values()) <= PLACES


def test_every_argument_of_compile_is_classified() -> None:
    arguments = inspect.signature(compile_with).parameters.keys() - {"spec"}
    assert arguments | {field.name for field in dataclasses.fields(CompileSpec)} == set(ARGUMENTS)
    assert inspect.signature(tov.compile).parameters.keys() <= set(ARGUMENTS)
    assert set(ARGUMENTS.values()) <= PLACES


def test_every_kind_of_entry_has_fields() -> None:
    assert set(FIELDS) == set(KINDS)
    for names in FIELDS.values():
        assert len(names) == len(set(names)) and {"format", "package", "torch", "openvino"} <= set(names)


@pytest.mark.parametrize("kind", sorted(FIELDS))
def test_unknown_and_missing_fields_are_refused(kind: str) -> None:
    whole = dict.fromkeys(FIELDS[kind], "x")
    assert len(make_key(kind, whole)) == 64
    for name in whole:
        with pytest.raises(KeyError, match=name):
            make_key(kind, {field: value for field, value in whole.items() if field != name})
    with pytest.raises(KeyError, match="more"):
        make_key(kind, whole | {"more": 1})
    with pytest.raises(KeyError):
        make_key("thing", whole)


@pytest.mark.parametrize("kind", sorted(FIELDS))
def test_every_field_changes_the_key(kind: str) -> None:
    whole = dict.fromkeys(FIELDS[kind], "x")
    keys = {make_key(kind, whole)} | {make_key(kind, whole | {name: "y"}) for name in whole}
    assert len(keys) == len(whole) + 1
    assert make_key(kind, dict(reversed(whole.items()))) == make_key(kind, whole)


def test_kinds_do_not_share_keys() -> None:
    assert digest({"kind": "call", "a": 1}) != digest({"kind": "blob", "a": 1})


def test_only_options_of_the_graph_enter_a_call() -> None:
    values = dataclasses.asdict(BackendOptions())
    assert set(graph_options(values)) == {"decompositions", "disabled_ops", "fallback_to", "min_partition_us"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


ALIKE = [
    1, 1.0, True, "1", [1], [[1]], {"1": 1}, 0.0, -0.0, False, None, "null", "", [], {}, [[]], [1, 2], [2, 1], [12],
    "1,2", ["1,2"], ["1", "2"], {"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": {"b": 2}}, "\u00e9", "e\u0301",
]  # fmt: skip


def test_values_that_look_alike_have_different_digests() -> None:
    assert len({digest(value) for value in ALIKE}) == len(ALIKE)


@given(st.dictionaries(st.text(), JSON, min_size=2, max_size=5))
def test_order_of_keys_does_not_matter(value: dict[str, object]) -> None:
    assert digest(value) == digest(dict(reversed(value.items())))


@pytest.mark.parametrize("for_level", [False, True])
def test_what_is_stored_has_exactly_the_listed_fields(tmp_path: Path, for_level: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU()).eval()
    options = {"model_caching": True, "cache_dir": str(tmp_path / "c")}
    compiled = compile_with(model, CompileSpec(options=options, cache=CacheSettings(for_level=for_level))).freeze()
    x = torch.randn(2, 6)
    with torch.no_grad():
        assert_same(compiled(x), model(x))
    entries = list(Store(tmp_path / "c").entries())
    assert sorted(entry.kind for entry in entries) == ["blob", "call", "partition"]
    for found in entries:
        assert set(found.fields) == set(FIELDS[found.kind])
        assert make_key(found.kind, found.fields) == found.key


def test_extension_libraries_of_one_name_are_told_apart(tmp_path: Path) -> None:
    libraries = tmp_path / "a" / "ops.so", tmp_path / "b" / "ops.so"
    found = []
    for contents in (b"1", b"2"), (b"3", b"2"):
        for library, content in zip(libraries, contents, strict=True):
            library.parent.mkdir(exist_ok=True)
            library.write_bytes(content)
        found.append(mappings_digest(Mappings(libraries=libraries)))
    assert found[0] != found[1] and all(not unknown for _, unknown in found)
