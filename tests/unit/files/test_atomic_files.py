"""Files that are written completely or not at all."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchserve_openvino.files.atomic import AtomicFile, write_atomically


def test_a_file_is_private_and_replaces_another(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    target.chmod(0o666)
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new" and target.stat().st_mode & 0o777 == 0o600
    write_atomically(target, b"newer", mode=0o644, sync=False)
    assert target.read_bytes() == b"newer" and target.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_draft_is_private_until_it_is_committed(tmp_path: Path) -> None:
    with AtomicFile(tmp_path / "file", mode=0o644) as draft:
        assert draft.path.parent == tmp_path and draft.path.stat().st_mode & 0o777 == 0o600
        draft.file.write(b"content")
        assert not (tmp_path / "file").exists()
        draft.commit()
    assert (tmp_path / "file").read_bytes() == b"content"


@pytest.fixture(params=["write", "flush", "sync", "rename", "body"])
def full_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    if request.param == "sync":
        monkeypatch.setattr(os, "fsync", fail)
    if request.param == "rename":
        monkeypatch.setattr(Path, "replace", fail)
    yield request.param


def test_nothing_stays_where_the_disk_is_full(tmp_path: Path, full_disk: str) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with pytest.raises(OSError, match="No space|no space"), AtomicFile(target) as draft:
        if full_disk == "body":
            raise OSError(errno.ENOSPC, "no space left on device")
        if full_disk in ("write", "flush"):
            # A device that is always full, in place of the draft.
            draft.file.close()
            draft.file = os.fdopen(os.open("/dev/full", os.O_RDWR), "w+b", 0 if full_disk == "write" else -1)
        draft.file.write(b"new")
        draft.commit()
    assert target.read_bytes() == b"old" and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_error_inside_is_the_one_that_is_raised(tmp_path: Path) -> None:
    with pytest.raises(KeyError), AtomicFile(tmp_path / "file") as draft:
        draft.file.write(b"half")
        raise KeyError("other")
    assert not list(tmp_path.iterdir())


def test_names_as_long_as_names_can_be(tmp_path: Path) -> None:
    write_atomically(tmp_path / ("x" * 255), b"content")
    assert (tmp_path / ("x" * 255)).read_bytes() == b"content"


def test_the_file_stays_open_where_that_is_wanted(tmp_path: Path) -> None:
    with AtomicFile(tmp_path / "file", sync=False) as draft:
        draft.commit()
        file = draft.keep_open()
    assert not file.closed
    file.close()


def test_permissions_of_another_file(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.write_bytes(b"")
    model.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(model, 1234, 1235)
    with AtomicFile(tmp_path / "file", like=model.stat()) as draft:
        draft.commit()
    made, expected = (tmp_path / "file").stat(), model.stat()
    assert (made.st_mode, made.st_uid, made.st_gid) == (expected.st_mode, expected.st_uid, expected.st_gid)
