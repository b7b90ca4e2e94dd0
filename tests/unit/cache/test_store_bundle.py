"""Export and import of entries as tar files, including damaged and malicious ones."""

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_helpers import BODY, FIELDS, FILES, content, key, manifest, object_of, put, rewrite
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchserve_openvino.cache.storage.bundle import export, import_
from torchserve_openvino.cache.storage.manifest import KINDS
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.errors import CacheDirectoryError


@pytest.fixture
def target(tmp_path):
    return Store(tmp_path / "target")


@pytest.fixture
def tar(store, tmp_path):
    put(store, 1)
    put(store, 2, files={"shared": FILES["model.bin"], "own": b"own" * 100, "empty": b""})
    export(store, tmp_path / "all.tar")
    return tmp_path / "all.tar"


def entries(store: Store) -> dict[str, object]:
    return {entry.key: (entry, content(entry)) for entry in store.entries()}


def assert_nothing_strange(store: Store) -> None:
    """The store holds only its own kinds of files: no partial writes, no unreferenced objects."""
    assert store.verify() == []
    assert not list((store.root / "tmp").glob("*"))
    named = {ref.digest for entry in store.entries() for ref in entry.files.values()}
    assert {path.name for path in store.objects.folder.rglob("*") if not path.is_dir()} == named
    assert {path.name for path in store.root.iterdir()} <= {"entries", "objects", "locks", "tmp"}


def test_there_and_back(store, tar, target):
    seen = []
    moved = import_(target, tar, progress=lambda done, total: seen.append((done, total)))
    assert (moved.entries, moved.problems) == (2, ())
    assert entries(target) == entries(store)
    assert seen[-1][0] <= seen[-1][1] == tar.stat().st_size
    assert_nothing_strange(target)
    again = import_(target, tar)
    assert (again.entries, again.bytes, again.problems) == (2, 0, ())


@pytest.mark.parametrize("kind", KINDS)
def test_entries_of_every_kind(store, target, tmp_path, kind):
    assert store.put(kind, key(1), fields=FIELDS, body=BODY, files=FILES) is not None
    export(store, tmp_path / "one.tar")
    moved = import_(target, tmp_path / "one.tar")
    assert (moved.entries, moved.problems) == (1, ()) and entries(target) == entries(store)


def test_always_the_same_bytes(store, tar, target, tmp_path):
    import_(target, tar)
    os.utime(manifest(target, 2), (1, 1))
    export(target, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == tar.read_bytes()
    with tarfile.open(tar, "r:") as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(m.mode, m.mtime, m.uid, m.gid, m.uname, m.gname, m.type) for m in members} == {
        (0o600, 0, 0, 0, "", "", b"0")
    }
    assert stat.S_IMODE(tar.stat().st_mode) == 0o600


def test_chosen_keys(store, tar, target, tmp_path):
    moved = export(store, tmp_path / "one.tar", [key(1), key(9)])
    assert moved.entries == 1 and [problem.reason for problem in moved.problems] == ["no such entry"]
    import_(target, tmp_path / "one.tar")
    assert list(entries(target)) == [key(1)]
    assert_nothing_strange(target)


def test_damaged_entries_are_left_out_and_named(store, tar, target, tmp_path):
    object_of(store, "own", 2).write_bytes(b"!" * 300)
    put(store, 3)
    manifest(store, 3).write_bytes(b"damaged")
    moved = export(store, tmp_path / "some.tar")
    assert moved.entries == 1 and {problem.key for problem in moved.problems} == {key(2), key(3)}
    assert import_(target, tmp_path / "some.tar").problems == ()


def test_an_export_that_fails_leaves_nothing(store, tar, tmp_path):
    with pytest.raises(OSError):
        export(store, tmp_path / "absent" / "x.tar")
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        export(store, tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_other_tar_programs_make_of_it(store, tar, target, tmp_path):
    """Unpacked and repacked: with folder members, other owners and times."""
    with tarfile.open(tar, "r:") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    with tarfile.open(tmp_path / "again.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("entries", "objects"):
            archive.add(tmp_path / "unpacked" / name, name)
    assert import_(target, tmp_path / "again.tar").problems == ()
    assert entries(target) == entries(store)


def repack(tar: Path, change: Callable[[tarfile.TarInfo, bytes], list[tuple[tarfile.TarInfo, bytes]]]) -> None:
    with tarfile.open(tar, "r:") as archive:
        members = [(member, archive.extractfile(member).read()) for member in archive.getmembers()]
    with tarfile.open(tar, "w", format=tarfile.GNU_FORMAT) as archive:
        for member, data in members:
            for info, content_ in change(member, data):
                info.size = len(content_) if info.isreg() else info.size
                archive.addfile(info, io.BytesIO(content_))


def renamed(info: tarfile.TarInfo, name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    other = tarfile.TarInfo(name)
    other.type, other.linkname, other.size = kind, link, info.size if kind == tarfile.REGTYPE else 0
    return other


def is_own(info: tarfile.TarInfo, data: bytes) -> bool:
    return info.name.startswith("objects/") and data == b"own" * 100


EXTRA = {
    "upward": ("../../evil", tarfile.REGTYPE, ""),
    "upward inside": ("entries/call/../../../evil", tarfile.REGTYPE, ""),
    "absolute": ("/tmp/evil-of-this-test", tarfile.REGTYPE, ""),
    "other name": ("entries/call/x.json", tarfile.REGTYPE, ""),
    "other kind": (f"entries/other/{'a' * 64}.json", tarfile.REGTYPE, ""),
    "wrong folder": (f"objects/bb/{'a' * 64}", tarfile.REGTYPE, ""),
    "newline": (f"objects/aa/{'a' * 64}\n", tarfile.REGTYPE, ""),
    "symlink": (f"objects/aa/{'a' * 64}", tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": (f"objects/aa/{'a' * 64}", tarfile.LNKTYPE, "/etc/passwd"),
    "device": (f"objects/aa/{'a' * 64}", tarfile.CHRTYPE, ""),
    "pipe": (f"entries/call/{'a' * 64}.json", tarfile.FIFOTYPE, ""),
    "folder link": ("objects", tarfile.SYMTYPE, "/etc"),
    "unnamed": (f"objects/aa/{'a' * 64}", tarfile.REGTYPE, ""),
    "sparse": (f"objects/aa/{'a' * 64}", tarfile.GNUTYPE_SPARSE, ""),
}


@pytest.mark.parametrize("name", EXTRA)
def test_a_strange_member_beside_good_entries(store, tar, target, name):
    place, kind, link = EXTRA[name]
    first = [True]

    def change(info, data):
        extra = [(renamed(info, place, kind, link), b"evil" if kind == tarfile.REGTYPE else b"")] if first else []
        first.clear()
        return [*extra, (info, data)]

    repack(tar, change)
    moved = import_(target, tar)
    assert len(moved.problems) == 1 and moved.entries == 2, moved.problems
    assert entries(target) == entries(store)
    assert_nothing_strange(target)
    assert not Path("/tmp/evil-of-this-test").exists() and not list(target.root.parent.glob("evil*"))


TAMPERED: dict[str, Callable] = {
    "flipped": lambda info, data: [(info, b"eve" * 100 if is_own(info, data) else data)],
    "cut": lambda info, data: [(info, data[:10] if is_own(info, data) else data)],
    "gone": lambda info, data: [] if is_own(info, data) else [(info, data)],
    "manifest": lambda info, data: [(info, data.replace(b'"own"', b'"eve"'))],
    "swapped": lambda info, data: [
        (renamed(info, f"entries/call/{key(2)}.json"), data) if info.name.endswith("2.json") else (info, data)
    ],
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_entry_stays_out_and_the_other_goes_in(tar, target, name):
    repack(tar, TAMPERED[name])
    moved = import_(target, tar)
    assert moved.entries == 1 and moved.problems
    assert list(entries(target)) == [key(1)]
    assert_nothing_strange(target)


def test_a_tampered_object_is_no_matter_where_a_good_one_lies_there(tar, target):
    target.put("blob", key(5), fields={}, body={}, files={"x": b"own" * 100})
    repack(tar, TAMPERED["flipped"])
    assert import_(target, tar).entries == 2


def test_members_that_come_twice(store, tar, target):
    repack(tar, lambda info, data: [(info, data), (info, data)])
    moved = import_(target, tar)
    assert moved.entries == 2 and {problem.reason for problem in moved.problems} == {"duplicate manifest"}
    assert_nothing_strange(target)


@pytest.mark.parametrize("size", [10**9, 8**11 - 1, 2**62])
def test_a_huge_declared_size(tar, target, size):
    data = tar.read_bytes()
    info = tarfile.TarInfo.frombuf(data[:512], "ascii", "strict")
    info.size = size
    tar.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + data[512:])
    moved = import_(target, tar)
    assert moved.entries == 0 and "past the end of the file" in moved.problems[0].reason


@pytest.mark.timeout(20)
def test_a_negative_size(tar, target):
    """Python's own reader loops forever on it."""
    data = bytearray(tar.read_bytes())
    data[124:136] = b"\xff" * 10 + (-1024 & 0xFFFF).to_bytes(2, "big")
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + sum(data[156:512]) + 8 * 32)
    tar.write_bytes(data)
    assert import_(target, tar).problems


def test_a_huge_size_in_a_manifest(store, target, tmp_path):
    put(store)
    rewrite(manifest(store), lambda record: record["files"]["model.bin"].update(bytes=2**60) and None)
    data = manifest(store).read_bytes()
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo(f"entries/partition/{key(1)}.json")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    moved = import_(target, tmp_path / "x.tar")
    assert moved.entries == 0 and "too large for a cache" in moved.problems[0].reason


def test_the_stores_limit_is_the_archives(tar, tmp_path):
    target = Store(tmp_path / "small", limit_bytes=11_200)
    moved = import_(target, tar)
    assert moved.entries == 1 and [problem.key for problem in moved.problems if problem.kind] == [key(2)]
    assert target.size().bytes <= 11_200
    assert_nothing_strange(target)


def test_older_entries_make_room(tar, tmp_path):
    target = Store(tmp_path / "small", limit_bytes=20_000)
    target.put("blob", key(7), fields={}, body={}, files={"x": b"x" * 15_000})
    assert import_(target, tar).entries == 2
    assert set(entries(target)) == {key(1), key(2)}


@pytest.mark.parametrize("length", [0, 100, 512, 700, 3000, -1024 * 8])
def test_a_cut_archive(store, tar, target, length):
    tar.write_bytes(tar.read_bytes()[:length])
    moved = import_(target, tar)
    assert moved.problems and moved.entries < 2
    assert {entry: entries(store)[entry] for entry in entries(target)} == entries(target)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_bytes(store, tar, target, tmp_path, data):
    whole = bytearray(tar.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "changed.tar").write_bytes(whole)
    target.clear()
    import_(target, tmp_path / "changed.tar")
    assert {entry: entries(store)[entry] for entry in entries(target)} == entries(target)
    assert_nothing_strange(target)


@pytest.mark.parametrize("data", [b"no tar at all" * 100, b"\x1f\x8b" + b"gzip" * 200, b"\x00" * 5000])
def test_no_archive(target, tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    moved = import_(target, tmp_path / "x")
    assert moved.entries == 0 and (moved.problems or not data.strip(b"\0"))


def test_a_store_that_cannot_be_written(tar, target):
    with pytest.raises(CacheDirectoryError, match="nothing can be imported"):
        import_(Store(target.root, writable=False), tar)


def test_a_full_disk_leaves_nothing_half(tar, target, monkeypatch):
    real, left = os.write, 3

    def write(fd, data):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space"):
        import_(target, tar)
    monkeypatch.undo()
    assert_nothing_strange(target)
