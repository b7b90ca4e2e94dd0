"""Which folders a store accepts, and what happens if it cannot write to them."""

import errno
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
from cache_helpers import FILES, content, key, manifest, put

from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.errors import CacheDirectoryError, ConfigError


@pytest.mark.parametrize("mode", [0o770, 0o720])
def test_a_group_may_write(root, mode):
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(CacheDirectoryError) as caught:
        Store(root)
    assert f"chmod go-w {root}" in str(caught.value) and f"mode {mode:04o}" in str(caught.value)
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(CacheDirectoryError):
        Store(root, writable=False)
    root.chmod(0o755)
    put(Store(root))


@pytest.mark.parametrize("mode", [0o707, 0o777, 0o1777, 0o2777])
def test_a_shared_folder_gets_a_private_subfolder(root, mode):
    root.mkdir()
    root.chmod(mode)
    store = Store(root)
    put(store)
    assert store.root.parent == root and store.root.stat().st_mode & 0o777 == 0o700
    assert content(Store(root, writable=False).get("partition", key(1))) == FILES
    store.root.chmod(0o770)
    with pytest.raises(CacheDirectoryError, match="chmod go-w"):
        Store(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_volume_of_another_owner_with_a_writable_group_gets_a_private_subfolder(root):
    root.mkdir()
    os.chown(root, 12345, -1)
    root.chmod(0o2775)
    assert Store(root).root.parent == root


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_subfolder_that_another_user_prepared_is_refused(root):
    root.mkdir()
    root.chmod(0o1777)
    inner = Store(root).root
    os.chown(inner, 12345, -1)
    with pytest.raises(CacheDirectoryError, match="owned by user 12345"):
        Store(root)
    shutil.rmtree(inner)
    inner.symlink_to(root)
    with pytest.raises(CacheDirectoryError, match="is a link"):
        Store(root)


@pytest.mark.parametrize("inner", ["entries", "objects", "locks", "tmp", "entries/partition", "objects/ab"])
def test_others_may_write_inside(root, inner):
    (root / inner).mkdir(parents=True)
    (root / inner).chmod(0o775)
    with pytest.raises(CacheDirectoryError, match=f"chmod go-w {root / inner}"):
        Store(root)


@pytest.mark.parametrize("inner", ["entries", "objects", "locks", "tmp", "entries/partition", "objects/ab"])
def test_links_inside(root, tmp_path, inner):
    (tmp_path / "elsewhere").mkdir()
    (root / inner).parent.mkdir(parents=True)
    (root / inner).symlink_to(tmp_path / "elsewhere")
    for private in (True, False):
        with pytest.raises(CacheDirectoryError, match="is a link"):
            Store(root, private=private)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_owned_by_another_user(root):
    root.mkdir()
    os.chown(root, 12345, -1)
    with pytest.raises(CacheDirectoryError, match=r"owned by user 12345.*chown -R 0"):
        Store(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_roots_own_folder_serves_another_user_who_can_read_it():
    # Not in pytest's folder, which other users cannot enter.
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        put(Store(root))
        for path in [root, *root.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setuid(12345)
                store = Store(root)
                code = 0 if content(store.get("partition", key(1))) == FILES and not store.writable else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_not_a_folder(root):
    root.write_text("file")
    with pytest.raises(CacheDirectoryError, match="is not a folder"):
        Store(root)
    with pytest.raises(CacheDirectoryError, match="a part of its path is a file"):
        Store(root / "below")


def test_a_link_to_a_good_folder_and_to_a_bad_one(root, tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "real")
    store = Store(root)
    put(store)
    assert store.root == tmp_path / "real"
    (tmp_path / "real").chmod(0o770)
    with pytest.raises(CacheDirectoryError):
        Store(root)
    shutil.rmtree(tmp_path / "real")
    with pytest.raises(CacheDirectoryError, match="does not exist"):
        Store(root)


def test_below_a_sticky_folder_and_below_an_open_one(tmp_path, caplog):
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    put(Store(tmp_path / "sticky" / "cache"))
    assert not caplog.records
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    put(Store(tmp_path / "open" / "cache"))
    assert "no sticky bit" in caplog.text


def test_parents_are_made_and_the_folder_is_private(tmp_path):
    store = Store(tmp_path / "a" / "b" / "cache")
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) & 0o500 == 0o500


def test_an_archives_folder_may_be_group_writable(store):
    put(store)
    for path in [store.root, *store.root.rglob("*")]:
        path.chmod(0o775 if path.is_dir() else 0o664)
    reader = Store(store.root, writable=False, private=False)
    assert content(reader.get("partition", key(1))) == FILES


def assert_nothing_is_stored(store: Store, reason: str) -> None:
    assert store.put("partition", key(5), fields={}, body={}, files={"a": b"b"}) is None
    assert store.events.write_failures == 2 and reason in store.events.last_write_failure
    with store.lock("partition", key(5)) as held:
        assert held is False
    assert store.prune() == store.clear()


def test_asked_for_reading_only(store, caplog):
    put(store)
    before = manifest(store).stat().st_mtime_ns
    reader = Store(store.root, writable=False)
    assert content(reader.get("partition", key(1))) == FILES
    assert manifest(store).stat().st_mtime_ns == before
    assert reader.events.write_failures == 0
    assert reader.put("partition", key(5), fields={}, body={}, files={"a": b"b"}) is None
    assert reader.read_only and reader.prune() == reader.clear() and reader.events.write_failures == 0
    reader.discard("partition", key(1))
    assert reader.get("partition", key(1)) is None and manifest(store).exists()


def test_a_reader_makes_no_folder(root):
    store = Store(root, writable=False)
    assert store.get("call", key(1)) is None and store.size() == (0, 0, 0) and store.verify() == []
    assert store.nearest("call", {}) is None and list(store.entries()) == []
    assert not root.exists()


def test_a_folder_that_cannot_be_made(root, monkeypatch, caplog):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    store = Store(root)
    monkeypatch.undo()
    assert not store.writable and "Permission denied" in store.why_read_only
    assert store.get("partition", key(1)) is None
    assert_nothing_is_stored(store, "Permission denied")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_folder_that_cannot_be_written(store, monkeypatch):
    put(store)
    monkeypatch.setattr(os, "access", lambda *_: False)
    again = Store(store.root)
    assert not again.writable and content(again.get("partition", key(1))) == FILES
    assert_nothing_is_stored(again, "cannot be written")


@pytest.fixture
def mounted(tmp_path):
    """A file system of 1 MB in memory; needs root."""
    place = tmp_path / "mount"
    place.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", place]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"mount does not work here: {made.stderr.decode()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk(mounted, caplog):
    store = Store(mounted)
    put(store, 1)
    for number in (2, 3):
        assert (
            store.put("blob", key(number), fields={}, body={}, files={"small": b"s", "big": os.urandom(2**21)}) is None
        )
    assert store.events.write_failures == 2 and store.events.last_write_failure == "No space left on device"
    assert len(caplog.records) == 1
    # A failed put cleans up at once.
    assert store.size()[:2] == (1, 2) and not list((mounted / "tmp").iterdir())
    assert content(store.get("partition", key(1))) == FILES
    put(store, 4)


def test_a_read_only_file_system(mounted):
    put(Store(mounted))
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    store = Store(mounted)
    assert not store.writable and content(store.get("partition", key(1))) == FILES
    assert_nothing_is_stored(store, "cannot be written")


def test_a_file_system_that_becomes_read_only(mounted, caplog):
    store = Store(mounted)
    put(store)
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    assert content(store.get("partition", key(1))) == FILES
    assert store.put("partition", key(2), fields={}, body={}, files={"a": b"b"}) is None
    assert store.events.last_write_failure == "Read-only file system"
    store.discard("partition", key(1))
    with store.lock("call", key(1)) as held:
        assert held is False


@pytest.mark.parametrize("call", ["write", "fsync", "replace", "mkdir", "open"])
def test_any_failing_call_costs_only_the_put(store, monkeypatch, call, caplog):
    put(store)
    real = getattr(os, call)

    def fail(*args, **more):
        if call != "open" or args[1] & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **more)

    for number in (2, 3):
        monkeypatch.setattr(os, call, fail)
        # The object needs a new folder, so that mkdir is called too.
        files = {"a": bytes([number]) * 1000}
        assert store.put("blob", key(number), fields={}, body={}, files=files) is None
        monkeypatch.undo()
    assert store.events.write_failures == 2 and store.events.last_write_failure == "No space left on device"
    assert len([record for record in caplog.records if record.name == "torchserve_openvino.cache.storage.store"]) == 1
    assert store.size()[:2] == (1, 2) and not list((store.root / "tmp").iterdir())
    put(store, 2)


def test_the_n_th_failing_call_leaves_a_sound_store(store, monkeypatch):
    put(store)
    for turn in range(1, 60):
        left = turn

        def failing(name, real):
            def call(*args, **more):
                nonlocal left
                left -= 1
                if left == 0:
                    raise OSError(errno.EIO, "Input/output error")
                return real(*args, **more)

            return call

        with monkeypatch.context() as patch:
            for name in ("open", "write", "fsync", "replace", "mkdir", "utime", "unlink", "close"):
                patch.setattr(os, name, failing(name, getattr(os, name)))
            made = store.put("partition", key(2), fields={}, body={"turn": turn}, files={"a": bytes([turn]) * 100})
        got = Store(store.root).get("partition", key(2))
        assert made is None or (got is not None and content(got) == {"a": bytes([turn]) * 100})
        if left > 0:
            break
    assert left > 0 and [problem for problem in store.verify() if problem.kind] == []


def test_a_source_that_is_not_there(store, tmp_path):
    assert store.put("blob", key(1), fields={}, body={}, files={"a": tmp_path / "absent"}) is None
    assert store.events.last_write_failure == "No such file or directory"


def test_a_failing_touch_is_no_failure(store, monkeypatch):
    put(store)

    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert content(store.get("partition", key(1))) == FILES
