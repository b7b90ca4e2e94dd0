"""Any damage to the store's files is a miss, logged and counted, never a wrong result."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_helpers import FILES, content, key, manifest, object_of, put, rewrite
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchserve_openvino.cache.storage.manifest import encode
from torchserve_openvino.cache.storage.store import DamagedEntryError, Store


def assert_lost(store: Store, reason: str, caplog: pytest.LogCaptureFixture | None = None) -> None:
    """Asserts a miss that is counted and logged, after which the entry is gone and can be stored again."""
    assert store.get("partition", key(1)) is None
    events = store.events
    assert (events.damaged, events.misses, events.hits) == (1, 1, 0)
    assert reason in events.last_damaged, events.last_damaged
    if caplog is not None:
        assert [reason in record.getMessage() for record in caplog.records] == [True]
    assert not os.path.lexists(manifest(store))
    put(store)
    assert content(store.get("partition", key(1))) == FILES and store.verify() == []


def test_a_manifest_cut_anywhere(store):
    put(store)
    whole = manifest(store).read_bytes()
    for length in [*range(0, 100), *range(100, len(whole), 37), len(whole) - 1]:
        manifest(store).write_bytes(whole[:length])
        assert store.get("partition", key(1)) is None
        assert not manifest(store).exists()
    manifest(store).write_bytes(whole + b" ")
    assert store.get("partition", key(1)) is None


def test_any_bit_flipped_in_a_manifest(store):
    put(store)
    whole = manifest(store).read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        manifest(store).write_bytes(flipped)
        assert store.get("partition", key(1)) is None, position
    assert store.events.damaged == len(whole)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300))
def test_any_bytes_as_a_manifest(store, data):
    put(store)
    manifest(store).write_bytes(data)
    assert store.get("partition", key(1)) is None


TAMPERED: dict[str, tuple[Callable, str]] = {
    "kind": (lambda r: r.update(kind="blob"), "belongs to 'blob'"),
    "key": (lambda r: r.update(key=key(2)), "belongs to"),
    "fields": (lambda r: r.update(fields=[1]), "are not JSON objects"),
    "fields gone": (lambda r: r.pop("fields"), "has the wrong keys"),
    "body": (lambda r: r.update(body=None), "are not JSON objects"),
    "created": (lambda r: r.update(created=5), "created is not text"),
    "one more": (lambda r: r.update(extra=1), "has the wrong keys"),
    "files": (lambda r: r.update(files=[]), "files is not a JSON object"),
    "upward": (lambda r: r["files"].update({"../../x": {"digest": key(1), "bytes": 1}}), "name of a file"),
    "absolute": (lambda r: r["files"].update({"/etc/passwd": {"digest": key(1), "bytes": 1}}), "name of a file"),
    "digest": (lambda r: r["files"]["model.bin"].update(digest="../../../etc/passwd"), "has no valid digest"),
    "digest case": (lambda r: r["files"]["model.bin"].update(digest="A" * 64), "has no valid digest"),
    "digest newline": (lambda r: r["files"]["model.bin"].update(digest="a" * 64 + "\n"), "has no valid digest"),
    "digest other": (lambda r: r["files"]["model.bin"].update(digest="a" * 64), "an object is missing"),
    "no digest": (lambda r: r["files"]["model.bin"].pop("digest"), "has no valid digest"),
    "no ref": (lambda r: r["files"].update({"model.bin": "x"}), "has no valid digest"),
    "bytes": (lambda r: r["files"]["model.bin"].update(bytes=5), "has 10240 bytes, not 5"),
    "bytes text": (lambda r: r["files"]["model.bin"].update(bytes="5"), "has no valid size"),
    "bytes bool": (lambda r: r["files"]["model.bin"].update(bytes=True), "has no valid size"),
    "bytes below": (lambda r: r["files"]["model.bin"].update(bytes=-1), "has no valid size"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_manifest_with_a_right_checksum(store, name, caplog):
    change, reason = TAMPERED[name]
    put(store)
    rewrite(manifest(store), lambda record: change(record) and None)
    assert [problem.key for problem in store.verify()] == [key(1)]
    with caplog.at_level(logging.WARNING):
        assert_lost(store, reason, caplog)


@pytest.mark.parametrize("name", ["schema", "kind", "key", "fields", "body", "files", "created", "checksum"])
def test_every_key_of_a_manifest_is_under_the_checksum(store, name):
    put(store)
    record = json.loads(manifest(store).read_bytes())
    checksum = record.pop("checksum")
    if name == "checksum":
        checksum = "0" * 64
    else:
        record[name] = {"other": 1}
    data = encode(record).partition(b'",')[2]
    manifest(store).write_bytes(b'{"checksum":"' + checksum.encode() + b'",' + data)
    assert_lost(store, "does not match its checksum")


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_another_schema_is_a_miss_and_stays(store, schema, caplog):
    put(store)
    rewrite(
        manifest(store), lambda record: {"schema": schema, "new": "layout", "things": list(record["files"].values())}
    )
    with caplog.at_level(logging.WARNING):
        assert store.get("partition", key(1)) is None
    assert store.events.damaged == 0 and not caplog.records and manifest(store).exists()
    assert store.verify() == [] and list(store.entries()) == []
    # Its objects do not count as orphans.
    for path in store.objects.folder.rglob("*"):
        os.utime(path, (1, 1))
    assert store.prune().files == 0
    put(store)
    assert store.get("partition", key(1)) is not None


def test_deep_json_is_damage_and_no_crash(store):
    from blake3 import blake3

    put(store)
    rest = b'{"body":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    manifest(store).write_bytes(b'{"checksum":"' + blake3(rest).hexdigest().encode() + b'",' + rest[1:])
    assert_lost(store, "the manifest is not valid JSON")


def test_a_huge_manifest_is_not_read(store):
    put(store)
    os.truncate(manifest(store), 65 * 2**20)
    assert_lost(store, f"has {65 * 2**20} bytes")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["read", "path"])
def test_a_flipped_object(store, how, caplog):
    entry = put(store)
    flip(object_of(store))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(DamagedEntryError, match=r"file 'model.bin' of partition"),
    ):
        getattr(entry, how)("model.bin")
    assert (store.events.damaged, len(caplog.records)) == (1, 1)
    assert store.get("partition", key(1)) is None
    put(store)
    assert content(store.get("partition", key(1))) == FILES and store.verify() == []


OBJECT_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: os.truncate(path, 100), "has 100 bytes, not 10240"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has 10241 bytes"),
    "empty": (lambda path: os.truncate(path, 0), "has 0 bytes"),
    "gone": (lambda path: path.unlink(), "an object is missing"),
    "folder": (lambda path: (path.unlink(), path.mkdir(), (path / "x").write_bytes(b"")), "not a plain file"),
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "not a plain file"),
    "link": (
        lambda path: (path.rename(path.parents[3] / "elsewhere"), path.symlink_to(path.parents[3] / "elsewhere")),
        "a link or a device",
    ),
    "dangling": (lambda path: (path.unlink(), path.symlink_to("/nowhere")), "a link or a device"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", OBJECT_DAMAGE)
def test_an_object_that_is_seen_to_be_wrong_without_reading(store, name, caplog):
    damage, reason = OBJECT_DAMAGE[name]
    put(store)
    damage(object_of(store))
    assert [problem.key for problem in store.verify()] == [key(1)]
    with caplog.at_level(logging.WARNING):
        assert_lost(store, reason, caplog)
    elsewhere = store.root.parent / "elsewhere"
    assert not elsewhere.exists() or elsewhere.read_bytes() == FILES["model.bin"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["folder", "pipe", "link", "dangling"])
def test_something_else_in_the_place_of_a_manifest(store, name):
    put(store)
    OBJECT_DAMAGE[name][0](manifest(store))
    assert_lost(store, OBJECT_DAMAGE[name][1])


def test_swapped_objects_of_one_size(store):
    entry = put(store, files={"a": b"a" * 100, "b": b"b" * 100})
    a, b = object_of(store, "a"), object_of(store, "b")
    (a.parent / "x").write_bytes(a.read_bytes())
    b.replace(a)
    with pytest.raises(DamagedEntryError, match="does not match its checksum"):
        entry.read("a")


def test_a_damaged_object_is_repaired_for_all_that_share_it(store):
    put(store, 1)
    second = put(store, 2)
    flip(object_of(store))
    put(store, 1)
    assert content(second) == FILES


def test_a_sound_entry_that_another_process_put_meanwhile_stays(store):
    entry = put(store)
    flip(object_of(store))
    put(Store(store.root), body={"newer": 1})
    flip(object_of(store))
    with pytest.raises(DamagedEntryError):
        entry.read("model.bin")
    assert manifest(store).exists()


def test_a_file_that_cannot_be_opened_just_now_is_not_damage(store, monkeypatch, caplog):
    put(store)
    real = os.open

    def full(path, *args, **more):
        if str(path).endswith(".json"):
            raise OSError(24, "Too many open files")
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", full)
    assert store.get("partition", key(1)) is None
    monkeypatch.undo()
    assert "Too many open files" in caplog.text and store.events.damaged == 0
    assert store.get("partition", key(1)) is not None


def test_a_manifest_that_others_may_write(store):
    put(store)
    manifest(store).chmod(0o620)
    assert_lost(store, "writable by other users")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_manifest_of_another_user(store):
    put(store)
    os.chown(manifest(store), 12345, -1)
    assert_lost(store, "owned by user 12345")


def test_a_read_only_store_hides_what_is_damaged(store, caplog):
    put(store)
    reader = Store(store.root, writable=False)
    flip(object_of(store))
    with pytest.raises(DamagedEntryError):
        reader.get("partition", key(1)).read("model.bin")
    assert reader.get("partition", key(1)) is None and reader.get("partition", key(1)) is None
    assert reader.events.damaged == 1 and manifest(store).exists()
    assert "stays, since the folder cannot be written" in caplog.text


def test_verify_names_damaged_orphans(store):
    put(store)
    path = store.objects.path_of("ab" * 32)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"not this")
    (problem,) = store.verify()
    assert "no entry refers to it" in problem.reason and problem.path == str(path)
