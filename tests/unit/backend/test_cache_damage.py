"""Whatever happens to the folder: results are correct, damage is reported, and the next start is warm again."""

import copy
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import openvino as ov
import pytest
import torch
from cache_models import Glued, Net, X, ask, assert_hit, cache_of, entries, fresh
from torch import nn

from torchserve_openvino.backend.routes.call_entry import read_call, read_interface
from torchserve_openvino.cache.identity.key import make_key
from torchserve_openvino.cache.storage.manifest import encode
from torchserve_openvino.cache.storage.store import Store


class Full(nn.Module):
    """Has cache files of every kind: two partitions, and a constant beside the weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        y = torch.digamma(x + 2) + torch.digamma(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
        return torch.tanh(self.second(y))


def place(store: Store, entry: Any, name: str | None = None) -> Path:
    """Returns the path of the manifest of an entry, or of one of its files."""
    if name is None:
        return store.root / "entries" / entry.kind / f"{entry.key}.json"
    return store.objects.path_of(entry.files[name].digest)


def write(path: Path, data: bytes) -> None:
    """Replaces the file atomically: existing memory mappings keep their pages."""
    draft = path.with_name("draft-of-a-test")
    draft.write_bytes(data)
    draft.chmod(0o600)
    draft.replace(path)


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a manifest and updates its checksum."""
    record = json.loads(path.read_bytes())
    del record["checksum"]
    change(record)
    write(path, encode(record))


def flip(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


HARM: dict[str, Callable[[bytes], bytes | None]] = {
    "half": lambda data: data[: len(data) // 2],
    "one byte less": lambda data: data[:-1],
    "a bit in the middle": flip,
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "gone": lambda data: None,
}
TARGETS = [("call", None), ("call", "tensors.safetensors"), ("partition", None), ("partition", "model.xml"),
           ("partition", "model.bin"), ("blob", None), ("blob", "blob")]  # fmt: skip


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the entries of a model; each test copies it."""
    folder = tmp_path_factory.mktemp("filled") / "c"
    ask(fresh(Full().eval(), folder), X)
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "c"))


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every folder look read-only; changing its mode would not stop root."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))


def discard_blobs(folder: Path) -> None:
    """Removes the blobs, without which partitions are read from their graphs."""
    for entry in entries(folder, "blob"):
        Store(folder).discard("blob", entry.key)


def complaints(cache: Mapping[str, Any]) -> int:
    """Counts what a cache report says was damaged, refused or rejected."""
    return cache["store"].get("damaged", 0) + len(cache["refused"]) + cache["verified"]["rejected"]


def recovers(folder: Path, kind: Callable[[], nn.Module] = Full, *, told: bool = True) -> dict[str, Any]:
    """Asserts correct results without a hit, then a hit at the next start; returns the cache report of the first."""
    compiled = fresh(kind().eval(), folder)
    for factor in (1, 2):
        ask(compiled, X * factor)
    cache = cache_of(compiled)
    assert cache["status"] in {"partial", "miss"}, cache
    assert complaints(cache) or not told, cache
    again = fresh(kind().eval(), folder)
    ask(again, X)
    assert_hit(again)
    # Orphaned objects have no kind; they are removed later.
    assert not [problem for problem in Store(folder).verify() if problem.kind]
    return cache


def test_the_model_has_files_of_every_kind(folder: Path) -> None:
    found = {(e.kind, name) for e in entries(folder) for name in (None, *e.files)}
    assert found == set(TARGETS)
    warm = fresh(Full().eval(), folder)
    ask(warm, X)
    assert_hit(warm)


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize(("kind", "name"), TARGETS, ids=str)
def test_a_damaged_file(folder: Path, kind: str, name: str | None, harm: str) -> None:
    store = Store(folder)
    if kind == "partition" and name is not None:
        discard_blobs(folder)
    path = place(store, entries(folder, kind)[0], name)
    data = HARM[harm](path.read_bytes())
    if data is None:
        path.unlink()
    else:
        write(path, data)
    recovers(folder, told=not (data is None and name is None))


@pytest.mark.parametrize(("kind", "name"), TARGETS, ids=str)
def test_a_file_of_another_entry_of_the_kind(folder: Path, kind: str, name: str | None) -> None:
    ask(fresh(Full(seed=5).eval(), folder), X)
    store = Store(folder)
    if kind == "partition" and name is not None:
        discard_blobs(folder)
    mine, others = entries(folder, kind)[0], entries(folder, kind)[1:]
    paths = [place(store, mine, name)] + [place(store, e, name) for e in others]
    others_paths = [path for path in paths[1:] if path.read_bytes() != paths[0].read_bytes()]
    if not others_paths:
        pytest.skip("all entries have the same file")
    first, second = paths[0].read_bytes(), others_paths[0].read_bytes()
    write(paths[0], second)
    write(others_paths[0], first)
    told = 0
    for seed in (0, 5):
        for _ in range(2):
            compiled = fresh(Full(seed).eval(), folder)
            ask(compiled, X)
            told += complaints(cache_of(compiled))
        warm = fresh(Full(seed).eval(), folder)
        ask(warm, X)
        assert_hit(warm)
    assert told


@pytest.mark.parametrize("kind", ["call", "partition", "blob"])
def test_a_manifest_of_another_schema(folder: Path, kind: str) -> None:
    for entry in entries(folder, kind):
        rewrite(place(Store(folder), entry), lambda record: record.update(schema=99))
    recovers(folder, told=False)


BODIES: list[Any] = [{}, {"interface": {}}, {"interface": None}, {"interface": {"runtime": "x"}}]


@pytest.mark.parametrize("body", BODIES, ids=str)
def test_a_partition_with_a_body_that_says_nothing(folder: Path, body: dict[str, Any]) -> None:
    rewrite(place(Store(folder), entries(folder, "partition")[0]), lambda record: record.update(body=body))
    recovers(folder)


def change_of(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["body"].update({name: value})


CALLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda record: record.update(body={}),
    "no parts": change_of("parts", []),
    "parts are text": change_of("parts", "abc"),
    "parts of an unknown key": lambda record: record["body"]["parts"][0].update(key="0" * 64),
    "parts of an impossible key": lambda record: record["body"]["parts"][0].update(key="../../x"),
    "parts swapped": lambda record: record["body"]["parts"].reverse(),
    "part keys swapped": lambda record: record["body"]["parts"].__setitem__(
        0, record["body"]["parts"][0] | {"key": record["body"]["parts"][1]["key"]}
    ),
    "no record": change_of("record", {}),
    "record is a list": change_of("record", [1]),
    "no inputs": change_of("inputs", []),
    "inputs of unknown weights": change_of("inputs", [["weight", "nothing"]]),
    "inputs beyond the call's": change_of("inputs", [["leaf", 7]]),
    "inputs of an unknown kind": change_of("inputs", [[1, 2]]),
    "no outputs": change_of("out", []),
    "outputs beyond the graph's": change_of("out", [[True, 9]]),
    "outputs of an unknown kind": change_of("out", [[False, {"os": "system"}]]),
    "an unknown structure": change_of(
        "out_spec", '[1, {"type": "nobody.knows", "context": "[]", "children_spec": []}]'
    ),
    "a structure of another size": lambda record: record["body"].update(
        out_spec='[1, {"type": "builtins.tuple", "context": "null", "children_spec": []}]'
    ),
    "an empty graph": change_of("outer", {"nodes": []}),
    "a graph of something else": change_of("outer", {"nodes": [{"op": "call", "name": "os.system", "args": {}}]}),
    "a graph that is a list": change_of("outer", []),
    "arguments of an unknown kind": lambda record: record["body"]["outer"]["nodes"][-1].update(args={"dict": [1]}),
    "a count is text": lambda record: record["body"]["record"].update(ops_total="many"),
    "a count is a fraction": lambda record: record["body"]["record"].update(ops_total=1.5),
    "a count is negative": lambda record: record["body"]["record"]["partitions"][0].update(ops=-3),
    "counts are text": lambda record: record["body"]["record"]["partitions"][0].update(op_counts="abc"),
    "names are counts": lambda record: record["body"]["record"].update(left_out={"aten.add": "x"}),
    "decomposed is text": lambda record: record["body"]["record"].update(decomposed={"aten.add": "x"}),
    "where is a list": lambda record: record["body"]["record"].update(where=["<b>"]),
    "an unknown field": lambda record: record["body"]["record"].update(more=1),
    "left out is text": change_of("left_out", "abc"),
    "left out of an unknown kind": change_of("left_out", [{"kind": "nothing"}]),
}  # fmt: skip


@pytest.mark.parametrize("change", CALLS.values(), ids=CALLS)
def test_a_call_whose_content_makes_no_sense(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The checksum is valid: the entry was forged, or written by different code of the same version."""
    rewrite(place(Store(folder), entries(folder, "call")[0]), change)
    compiled = fresh(Full().eval(), folder)
    for factor in (1, 2):
        ask(compiled, X * factor)
    summary = compiled.report.to_dict()["summary"]
    assert type(summary["ops_total"]) is int and 0 <= summary["ops_on_openvino"] <= summary["ops_total"]
    assert compiled.report.to_text()
    again = fresh(Full().eval(), folder)
    ask(again, X)
    assert_hit(again)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each value in a body; below arguments and literals any plain value is right."""
    if path[-1:] in {("args",), ("kwargs",)}:
        return
    yield path
    if path[:1] in {("inputs",), ("out",)}:
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from paths_in(each, (*path, key))


def with_value(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(body)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("kind", "read"), [("call", read_call), ("partition", read_interface)], ids=["call", "partition"]
)
def test_no_value_of_a_body_has_another_type(folder: Path, kind: str, read: Callable[[Any], Any]) -> None:
    body = json.loads(json.dumps(entries(folder, kind)[0].body))
    read(body)
    checked = 0
    for path in paths_in(body):
        # No value of a body may be any of these.
        for odd in ({"a": [{}]}, [[[["x"]]]]):
            with pytest.raises((ValueError, KeyError, TypeError)):
                read(with_value(body, path, odd))
            checked += 1
    assert checked > 20


def put_in_place(folder: Path, entry: Any, files: Mapping[str, bytes]) -> None:
    """Stores other content under the key of an entry, with valid checksums."""
    done = Store(folder).put(entry.kind, entry.key, fields=entry.fields, body=entry.body, files=files)
    assert done is not None


TENSORS = ["empty", "x", "zeros", "nothing inside"]


@pytest.mark.parametrize("content", [b"", b"x", b"\x00" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00{}"], ids=TENSORS)
def test_tensors_that_are_none(folder: Path, content: bytes) -> None:
    put_in_place(folder, entries(folder, "call")[0], {"tensors.safetensors": content})
    recovers(folder)


@pytest.mark.parametrize("content", [b"", b"x" * 1000, b"<net/>"], ids=["empty", "text", "xml"])
def test_a_blob_that_is_none(folder: Path, content: bytes) -> None:
    for entry in entries(folder, "blob"):
        put_in_place(folder, entry, {"blob": content})
    recovers(folder)


@pytest.mark.parametrize("name", ["model.xml", "model.bin"])
def test_a_graph_of_openvino_that_is_none(folder: Path, name: str) -> None:
    store = Store(folder)
    discard_blobs(folder)
    for entry in entries(folder, "partition"):
        files = {each: store.load("partition", entry.key).read(each) for each in entry.files}
        put_in_place(folder, entry, files | {name: b"<net/>"})
    recovers(folder)


class Wide(nn.Module):
    """Like `Net`, with other input and output shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 9), nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def foreign_blob(tmp_path: Path, model: nn.Module, x: torch.Tensor) -> bytes:
    ask(fresh(model.eval(), tmp_path / "other"), x)
    (entry,) = entries(tmp_path / "other", "blob")
    return entry.read("blob")


@pytest.mark.parametrize("same_shape", [True, False], ids=["same shapes", "other shapes"])
def test_a_blob_of_another_model_under_the_right_key(tmp_path: Path, same_shape: bool) -> None:
    other = (Net(seed=7), X) if same_shape else (Wide(), torch.randn(2, 9))
    blob = foreign_blob(tmp_path, *other)
    folder = tmp_path / "c"
    ask(fresh(Net().eval(), folder), X)
    (entry,) = entries(folder, "blob")
    put_in_place(folder, entry, {"blob": blob})
    assert recovers(folder, Net)["verified"]["rejected"] == 1


def test_a_rejected_answer_leaves_nothing_in_the_report(tmp_path: Path) -> None:
    blob = foreign_blob(tmp_path, Net(seed=7), X)
    folder = tmp_path / "c"
    cold = fresh(Net().eval(), folder)
    ask(cold, X)
    put_in_place(folder, entries(folder, "blob")[0], {"blob": blob})
    compiled = fresh(Net().eval(), folder)
    ask(compiled, X)
    assert cache_of(compiled)["verified"]["rejected"] == 1
    for name in ("graphs", "partitions", "ops_total", "coverage"):
        assert getattr(compiled.report.summary, name) == getattr(cold.report.summary, name), name


def test_a_rejected_graph_is_not_kept_for_the_next_signature(tmp_path: Path) -> None:
    class Scaled(Net):
        def forward(self, x: torch.Tensor, name: str = "a") -> torch.Tensor:
            return super().forward(x)

    blob = foreign_blob(tmp_path, Net(seed=7), X)
    folder = tmp_path / "c"
    first = fresh(Scaled().eval(), folder)
    ask(first, X, "a")
    ask(first, X, "b")
    assert len(entries(folder, "blob")) == 1 and len(entries(folder, "call")) == 2
    put_in_place(folder, entries(folder, "blob")[0], {"blob": blob})
    compiled = fresh(Scaled().eval(), folder)
    ask(compiled, X, "a")
    ask(compiled, X, "b")
    assert cache_of(compiled)["verified"]["rejected"] == 1


# --- the folder -------------------------------------------------------------------------------------------------


def test_everything_is_gone(folder: Path) -> None:
    Store(folder).clear()
    recovers(folder, told=False)


def test_the_folder_goes_away_while_a_model_runs(folder: Path) -> None:
    compiled = fresh(Full().eval(), folder)
    ask(compiled, X)
    shutil.rmtree(folder)
    ask(compiled, X * 2)
    ask(compiled, X[:1])


@pytest.mark.usefixtures("read_only")
def test_a_folder_that_can_only_be_read(folder: Path) -> None:
    before = sorted(path for path in folder.rglob("*") if path.is_file())
    warm = fresh(Full().eval(), folder)
    ask(warm, X)
    assert_hit(warm)
    ask(warm, X[:1])
    other = fresh(Full(seed=3).eval(), folder)
    ask(other, X)
    ask(other, X)
    cache = cache_of(other)
    assert cache["stored"] == 0 and cache["store"]["write_failures"] >= 1 and cache["traces"] == 1
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == before


@pytest.mark.usefixtures("read_only")
def test_damage_in_a_folder_that_can_only_be_read(folder: Path) -> None:
    path = place(Store(folder), entries(folder, "blob")[0], "blob")
    write(path, flip(path.read_bytes()))
    for _ in range(2):
        compiled = fresh(Full().eval(), folder)
        for _ in range(3):
            ask(compiled, X)
        assert cache_of(compiled)["traces"] == 0 and cache_of(compiled)["compiles"] == 1
        assert cache_of(compiled)["store"].get("damaged") == 1


@pytest.mark.parametrize("call", ["write", "fsync", "replace", "open"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    real = getattr(os, call)

    def full(*args: Any, **kwargs: Any) -> Any:
        if (call == "open" and not args[1] & os.O_CREAT) or (call == "write" and args[0] < 3):
            return real(*args, **kwargs)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = tmp_path / "c"
    model = Glued().eval()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        compiled = fresh(model, folder)
        for factor in (1, 2):
            ask(compiled, X * factor)
    cache = cache_of(compiled)
    assert cache["stored"] == 0 and cache["store"]["write_failures"] >= 1
    assert "No space left" in str(cache["store"]["last_write_failure"])
    ask(fresh(Glued().eval(), folder), X)
    warm = fresh(Glued().eval(), folder)
    ask(warm, X)
    assert_hit(warm)


# --- another CPU ------------------------------------------------------------------------------------------------

LESSER = """
import os, sys
os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
from cache_models import Net, X, ask, fresh
ask(fresh(Net().eval(), Path(sys.argv[3])), X)
"""


def test_a_blob_of_another_cpu(tmp_path: Path) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-c", LESSER, str(here), str(here.parents[1]), str(tmp_path / "far")]
    subprocess.run(command, check=True, timeout=120)
    folder = tmp_path / "c"
    ask(fresh(Net().eval(), folder), X)
    (mine,), (theirs,) = entries(folder, "blob"), entries(tmp_path / "far", "blob")
    assert mine.key != theirs.key and mine.fields["partition"] == theirs.fields["partition"]
    assert make_key("blob", theirs.fields) == theirs.key
    with pytest.raises(RuntimeError):
        ov.Core().import_model(theirs.read("blob"), "CPU")
    put_in_place(folder, mine, {"blob": theirs.read("blob")})
    cache = recovers(folder, Net)
    assert (cache["traces"], cache["compiles"], cache["imports"]) == (0, 1, 0), cache
    # A whole folder from another machine, as in a container image.
    cache = recovers(tmp_path / "far", Net, told=False)
    assert (cache["traces"], cache["compiles"], cache["imports"]) == (0, 1, 0), cache
