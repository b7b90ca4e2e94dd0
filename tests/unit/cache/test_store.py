import json
import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cache_helpers import BODY, FIELDS, FILES, child, content, key, manifest, object_of, put
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchserve_openvino.cache.storage import housekeeping
from torchserve_openvino.cache.storage.housekeeping import ORPHAN_SECONDS
from torchserve_openvino.cache.storage.manifest import MAX_BYTES
from torchserve_openvino.cache.storage.store import DamagedEntryError, Store

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=4)
CONTENT = st.dictionaries(st.from_regex(r"[a-z0-9._-]{1,64}", fullmatch=True), st.binary(max_size=3000), max_size=3)


def test_what_was_put_is_got(store):
    made = put(store)
    got = store.get("partition", key(1))
    assert got == made
    assert (got.fields, got.body, content(got)) == (FIELDS, BODY, FILES)
    assert got.path("model.bin").read_bytes() == FILES["model.bin"]
    assert content(made) == FILES
    assert store.events.to_dict() == {
        "hits": 1, "misses": 0, "stored": 1, "damaged": 0, "write_failures": 0, "evicted": 0, "lock_waits": 0,
        "lock_timeouts": 0, "last_damaged": None, "last_write_failure": None,
    }  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=OBJECTS, body=OBJECTS, files=CONTENT)
def test_any_json_and_any_bytes_come_back(store, fields, body, files):
    made = store.put("call", key(7), fields=fields, body=body, files=files)
    got = Store(store.root).get("call", key(7))
    assert (got.fields, got.body, content(got)) == (fields, body, files) and got == made


def test_files_from_every_kind_of_source(store, tmp_path):
    source = tmp_path / "elsewhere"
    source.write_bytes(b"from a file" * 1000)
    strided = memoryview(bytearray(range(100)))[::3]
    wide = memoryview(bytearray(64)).cast("d", (2, 4))
    files = {"file": source, "view": strided, "wide": wide, "empty": memoryview(b""), "array": bytearray(b"x")}
    store.put("blob", key(1), fields={}, body={}, files=files)
    source.unlink()
    assert content(store.get("blob", key(1))) == {
        "file": b"from a file" * 1000, "view": strided.tobytes(), "wide": bytes(64), "empty": b"", "array": b"x",
    }  # fmt: skip


def test_tuples_come_back_as_lists_from_put_as_from_get(store):
    made = store.put("call", key(1), fields={"shape": (1, 2)}, body={}, files={})
    assert made.fields == {"shape": [1, 2]} == store.get("call", key(1)).fields


def test_equal_content_lies_there_once(store):
    put(store, 1)
    put(store, 2, files={"copy": FILES["model.bin"]})
    assert store.size() == (2, 2, sum(manifest(store, n).stat().st_size for n in (1, 2)) + 300 + 10240)


def test_a_good_object_is_not_written_again(store):
    put(store, 1)
    before = object_of(store).stat().st_ino
    put(store, 2)
    assert object_of(store).stat().st_ino == before


def test_nobody_else_may_look(store):
    old = os.umask(0)
    try:
        with store.lock("partition", key(1)):
            put(store)
    finally:
        os.umask(old)
    for folder, _, names in os.walk(store.root):
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        assert {stat.S_IMODE((Path(folder) / name).stat().st_mode) for name in names} <= {0o600}
    assert not list((store.root / "tmp").iterdir())


@pytest.mark.parametrize("kind", ["Call", "../call", "", "other"])
def test_a_kind_that_is_none(store, kind):
    with pytest.raises(ValueError, match="kind must be one of"):
        store.get(kind, key(1))


@pytest.mark.parametrize("bad", ["", "A" * 64, "f" * 63, "f" * 64 + "\n", "../" + "f" * 61, 5])
def test_a_key_that_is_none(store, bad):
    for use in (store.get, store.discard, store.lock, lambda k, x: store.put(k, x, fields={}, body={})):
        with pytest.raises(ValueError, match="64 hexadecimal"):
            use("call", bad)


@pytest.mark.parametrize("name", ["", "..\n", "a/b", "../x", "A", "a" * 65, "/etc/passwd"])
def test_a_file_name_that_is_none(store, name):
    with pytest.raises(ValueError, match="a file's name"):
        store.put("call", key(1), fields={}, body={}, files={name: b""})


@pytest.mark.parametrize("body", [{"x": float("nan")}, {"x": object()}, {"x": {1: 2, "a": 3}}])
def test_what_is_no_json_is_the_callers_error(store, body):
    with pytest.raises((ValueError, TypeError)):
        store.put("call", key(1), fields={}, body=body)


def test_a_manifest_beyond_the_limit_is_not_stored(store, monkeypatch):
    monkeypatch.setattr("torchserve_openvino.cache.storage.store.MAX_BYTES", 1000)
    assert store.put("call", key(1), fields={}, body={"x": "y" * 1000}, files={"a": b"b"}) is None
    assert "more than 1000" in store.events.last_write_failure
    assert store.size() == (0, 0, 0) and MAX_BYTES == 64 * 2**20


def test_a_file_that_the_entry_lacks(store):
    with pytest.raises(DamagedEntryError, match="has no file 'other'"):
        put(store).read("other")


def test_discard_takes_the_objects_that_nobody_shares(store):
    put(store, 1)
    put(store, 2, files={"a": FILES["model.bin"]})
    store.discard("partition", key(1))
    store.discard("partition", key(9))
    assert store.get("partition", key(1)) is None
    assert store.size().objects == 1 and content(store.get("partition", key(2))) == {"a": FILES["model.bin"]}


def test_nearest(store):
    assert store.nearest("call", {"a": 1}) is None
    for number, fields in enumerate([{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}]):
        store.put("call", key(number), fields=fields, body={})
    store.put("blob", key(0), fields={"a": 1, "b": 3}, body={})
    assert store.nearest("call", {"a": 1, "b": 3}) == {"b": (2, 3)}
    assert store.nearest("call", {"a": 1, "b": 1, "c": (1,)}) == {"c": (1, [1])}
    assert store.nearest("call", {"a": 1}) == {"b": (2, None)}
    assert store.nearest("call", {"a": 2, "b": 2}) == {}


def test_the_least_recently_used_goes_first(root):
    store = Store(root)
    for number in range(5):
        put(store, number, files={"a": bytes([number]) * 100_000})
    store.get("partition", key(0))
    # Inspection does not count as use.
    list(store.entries())
    store.nearest("partition", {})
    store.limit_bytes = 350_000
    put(store, 5, files={"a": b"5" * 100_000})
    assert {entry.key for entry in store.entries()} == {key(4), key(0), key(5)}
    assert store.events.evicted == 3 and store.size().objects == 3


def test_what_was_just_written_stays_however_large(root):
    store = Store(root, limit_bytes=10)
    put(store, 1)
    put(store, 2, files={"a": b"other"})
    assert [entry.key for entry in store.entries()] == [key(2)] and content(store.get("partition", key(2)))


def test_a_shared_object_stays_while_anyone_names_it(root):
    store = Store(root)
    put(store, 1, files={"a": b"x" * 100_000})
    put(store, 2, files={"a": b"x" * 100_000, "b": b"y" * 1000})
    store.prune(101_600)
    assert {entry.key for entry in store.entries()} == {key(2)}
    assert content(store.get("partition", key(2)))["a"] == b"x" * 100_000


def test_prune_by_age_and_of_orphans(store):
    for number in (1, 2):
        put(store, number, files={"a": bytes([number]) * 50})
    old = time.time() - ORPHAN_SECONDS - 10
    os.utime(manifest(store, 1), (old, old))
    for name, age in (("a" * 64, 0.0), ("b" * 64, old)):
        path = store.objects.path_of(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"orphan")
        if age:
            os.utime(path, (age, age))
    for name in ("young", "old"):
        (store.root / "tmp" / name).write_bytes(b"half")
    os.utime(store.root / "tmp" / "old", (old, old))
    freed = store.prune(older_than=ORPHAN_SECONDS)
    assert (freed.entries, freed.files) == (1, 3)
    assert [path.name for path in (store.root / "tmp").iterdir()] == ["young"]
    assert store.objects.path_of("a" * 64).exists() and not store.objects.path_of("b" * 64).exists()
    assert store.clear().entries == 1
    assert store.size() == (0, 0, 0) and not list((store.root / "tmp").iterdir())


def test_old_drafts_go_when_a_store_is_opened(store):
    put(store)
    (store.root / "tmp" / "old").write_bytes(b"half")
    os.utime(store.root / "tmp" / "old", (1, 1))
    Store(store.root)
    assert not list((store.root / "tmp").iterdir())


def test_a_reader_whose_entry_was_evicted(store, caplog):
    entry = put(store)
    other = Store(store.root)
    other.clear()
    with caplog.at_level(logging.WARNING), pytest.raises(DamagedEntryError, match="an object is missing"):
        entry.read("model.bin")
    assert store.get("partition", key(1)) is None
    assert not store.events.damaged and not caplog.records


EVICTOR = """
import sys
from pathlib import Path
from torchserve_openvino.cache.storage.store import Store
store = Store(Path(sys.argv[1]), limit_bytes=400_000)
print("ready", flush=True)
for turn in range(10_000):
    number = turn % 12
    files = {"a": bytes([number]) * 60_000, "s": b"s" * 5000}
    store.put("blob", f"{number:064x}", fields={}, body={"n": number}, files=files)
"""


@pytest.mark.timeout(60)
def test_a_reader_and_a_writer_beside_eviction_in_another_process(root):
    store = Store(root, limit_bytes=400_000)
    with child(EVICTOR, root) as process:
        assert process.stdout.readline() == "ready\n"
        hits = misses = 0
        started = time.monotonic()
        while (passed := time.monotonic() - started) < 3 and not (passed > 1 and hits and misses):
            for number in range(12):
                entry = store.get("blob", key(number))
                try:
                    got = content(entry)
                except DamagedEntryError:
                    got = None
                if got is None:
                    misses += 1
                    continue
                assert got == {"a": bytes([number]) * 60_000, "s": b"s" * 5000}
                hits += 1
            assert store.put("blob", key(20), fields={}, body={}, files={"s": b"s" * 5000}) is not None
        assert process.poll() is None
    assert hits and misses
    assert store.events.damaged == 0, store.events.last_damaged
    assert not [problem for problem in store.verify() if problem.kind]
    put(store, 30)
    assert store.size().bytes < 500_000


def test_it_imports_without_torch():
    code = (
        "import sys, torchserve_openvino.cache.storage.store\n"
        "print({'torch', 'openvino', 'pydantic'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def test_verify_of_a_sound_store(store):
    put(store, 1)
    put(store, 2)
    seen = []
    assert store.verify(lambda done, total: seen.append((done, total))) == []
    assert seen[-1] == (10540, 10540)


def test_the_manifest_is_plain_canonical_json(store):
    put(store)
    record = json.loads(manifest(store).read_bytes())
    assert list(record) == ["checksum", "body", "created", "fields", "files", "key", "kind", "schema"]
    assert record["created"].endswith("+00:00")


def test_objects_of_an_entry_that_cannot_be_read_stay(store, monkeypatch):
    put(store, 1, files={"a": b"1" * 50})
    old = time.time() - ORPHAN_SECONDS - 10
    for path in (store.root / "objects").glob("*/*"):
        os.utime(path, (old, old))

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        # As where another user owns the manifest.
        patch.setattr(housekeeping, "open_plain", refused)
        assert store.prune().files == 0
    entry = store.get("partition", key(1))
    assert entry is not None and entry.path("a").read_bytes() == b"1" * 50
