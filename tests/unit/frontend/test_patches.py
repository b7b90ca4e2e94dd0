"""TorchServe's frontend: its state, patched, and as it was."""

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from torchserve_openvino.cli import app
from torchserve_openvino.errors import FrontendError
from torchserve_openvino.frontend import Frontend
from torchserve_openvino.frontend.class_file import ClassFile
from torchserve_openvino.frontend.patches import CLASSES

BATCHES, AGGREGATOR, WORKER = CLASSES


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None and len(set(archive.namelist())) == len(archive.namelist())
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def jar(tmp_path: Path) -> Path:
    """TorchServe's own classes, and something else."""
    made = tmp_path / "model-server.jar"
    with zipfile.ZipFile(made, "w") as archive:
        with zipfile.ZipFile(Frontend.installed().path) as installed:
            for name in CLASSES:
                kept = f"META-INF/torchserve-openvino/{name}"
                archive.writestr(name, installed.read(kept if kept in installed.namelist() else name))
        archive.writestr("other", b"kept")
    made.chmod(0o640)
    return made


def test_the_installed_one_is_known() -> None:
    assert Frontend.installed().state in {"faulty", "patched"}


def test_it_is_mended_once_and_put_back(jar: Path) -> None:
    before = contents(jar)
    found = Frontend(jar)
    assert found.state == "faulty" and not found.undo() and contents(jar) == before
    assert found.patch() and found.state == "patched" and not found.patch()
    after = contents(jar)
    assert after["other"] == b"kept" and {name: after[name] for name in CLASSES} == found.patched_classes()
    assert Frontend(jar).state == "patched" and not Frontend(jar).patch() and jar.stat().st_mode & 0o777 == 0o640
    assert Frontend(jar).undo() and contents(jar) == before and Frontend(jar).state == "faulty"
    assert [each.name for each in jar.parent.iterdir()] == [jar.name]


def test_what_is_changed_is_what_is_meant(jar: Path) -> None:
    with zipfile.ZipFile(jar) as archive:
        own = {name: ClassFile(archive.read(name)) for name in CLASSES}
    made = {name: ClassFile(data) for name, data in Frontend(jar).patched_classes().items()}
    assert b"java/util/LinkedHashMap" not in made[AGGREGATOR].to_bytes()
    before, after = (each[WORKER].code("run", "()V") for each in (own, made))
    assert after.body[8:] == before.body and len(after.caught) == len(before.caught) - 1
    # One of the two that catch an interrupt is gone.
    interrupt = own[WORKER].type("java/lang/InterruptedException")
    assert [each.type for each in before.caught].count(interrupt) == 2
    assert [each.type for each in after.caught].count(interrupt) == 1
    assert own[AGGREGATOR].code("handleErrorJob", "(Lorg/pytorch/serve/job/Job;)V").stack == 2
    assert made[AGGREGATOR].code("cleanJobs", "()V").body[-1:] == b"\xb1"


@pytest.mark.parametrize("change", ["another class", "a class is missing", "patched otherwise"])
def test_another_version_is_not_touched(jar: Path, change: str) -> None:
    if change == "patched otherwise":
        Frontend(jar).patch()
    files = contents(jar)
    if change == "a class is missing":
        del files[WORKER]
    else:
        files[WORKER] += b"x"
    with zipfile.ZipFile(jar, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    found = Frontend(jar)
    if change == "patched otherwise":
        assert found.state == "outdated"
        return
    assert found.state == "unknown" and not found.undo()
    with pytest.raises(FrontendError, match=r"not TorchServe 0\.12\.0's"):
        found.patch()
    assert contents(jar) == files


@pytest.mark.parametrize("data", [None, b"no archive"])
def test_what_cannot_be_read_is_an_error(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "model-server.jar"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(FrontendError, match="can't be read"):
        Frontend(path)


def test_what_cannot_be_written_stays_as_it_is(jar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(jar)

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(FrontendError, match="no space left"):
        Frontend(jar).patch()
    assert contents(jar) == before and Frontend(jar).state == "faulty"


def test_the_command_shows_mends_and_puts_back(jar: Path) -> None:
    def run(*args: str) -> Any:
        return CliRunner().invoke(app, ["frontend", "--jar", str(jar), *args])

    shown = run()
    assert "faulty" in shown.stdout and "frontend --patch" in shown.stdout
    patched = run("--patch")
    assert "patched" in patched.stdout and "Start TorchServe again" in patched.stdout and not patched.stderr
    assert json.loads(run("--patch", "--json").stdout) == {"path": str(jar), "state": "patched", "changed": False}
    former = run("--mend", "--json")
    assert json.loads(former.stdout)["state"] == "patched" and "--mend is now called --patch" in former.stderr
    assert json.loads(run("--undo", "--json").stdout) == {"path": str(jar), "state": "faulty", "changed": True}
    both = run("--mend", "--undo")
    assert both.exit_code == 1 and "exclude each other" in both.stderr
    jar.write_bytes(b"")
    broken = run()
    assert broken.exit_code == 1 and "can't be read" in broken.stderr


def test_check_says_that_requests_may_be_lost(jar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frontend, "installed", classmethod(lambda cls: cls(jar)))

    def notes(text: str) -> list[str]:
        file = tmp_path / "model-config.yaml"
        file.write_text(text)
        shown = CliRunner().invoke(app, ["check", str(file), "--json"]).stdout
        found: list[str] = json.loads(shown)["notes"]
        plain = CliRunner().invoke(app, ["check", str(file)]).stdout
        assert all(note in plain for note in found)
        return found

    assert notes("minWorkers: 1\n") == []
    (note,) = notes("asyncCommunication: true\n")
    assert "frontend --patch" in note
    Frontend(jar).patch()
    assert notes("asyncCommunication: true\n") == []


def test_undo_gives_back_every_byte(jar: Path) -> None:
    before = jar.read_bytes()
    assert Frontend(jar).patch() and jar.read_bytes() != before
    assert Frontend(jar).undo() and jar.read_bytes() == before


def test_what_was_changed_since_cannot_be_put_back(jar: Path) -> None:
    Frontend(jar).patch()
    data = bytearray(jar.read_bytes())
    data[data.index(b"kept")] ^= 1
    jar.write_bytes(data)
    with pytest.raises(FrontendError, match="install torchserve again"):
        Frontend(jar).undo()
    assert jar.read_bytes() == data


def test_what_an_earlier_version_mended_is_renewed_and_put_back(jar: Path) -> None:
    before = contents(jar)
    made = Frontend(jar).patched_classes()
    # It replaced two classes, and kept nothing else.
    files = {**before, WORKER: made[WORKER], AGGREGATOR: made[WORKER]}
    files |= {f"META-INF/torchserve-openvino/{name}": before[name] for name in (WORKER, AGGREGATOR)}
    with zipfile.ZipFile(jar, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    assert Frontend(jar).state == "outdated"
    assert Frontend(jar).patch() and Frontend(jar).state == "patched"
    assert {name: contents(jar)[name] for name in CLASSES} == made
    assert Frontend(jar).undo() and contents(jar) == before


def test_owner_mode_and_link_stay(jar: Path) -> None:
    link = jar.parent / "link.jar"
    link.symlink_to(jar.name)
    if os.geteuid() == 0:
        os.chown(jar, 1234, 1235)
    before = jar.stat()
    for change in ("patch", "undo"):
        assert getattr(Frontend(link), change)()
        after = jar.stat()
        assert link.is_symlink() and not jar.is_symlink()
        assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_jar_that_was_replaced_meanwhile_is_left_alone(
    jar: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgraded = jar.with_name("upgraded.jar")
    with zipfile.ZipFile(upgraded, "w") as archive:
        archive.writestr("other", b"of a later version")
    expected = upgraded.read_bytes()
    found = Frontend(jar)
    if moment == "before":
        upgraded.replace(jar)
    else:
        real = shutil.copyfileobj

        def copy(*args: Any) -> None:
            real(*args)
            upgraded.replace(jar)

        monkeypatch.setattr("shutil.copyfileobj", copy)
    with pytest.raises(FrontendError, match="replaced meanwhile"):
        found.patch()
    assert jar.read_bytes() == expected and [each.name for each in jar.parent.iterdir()] == [jar.name]


def test_another_users_jar_is_not_taken_over(jar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4321)
    with pytest.raises(FrontendError, match="belongs to user"):
        Frontend(jar).patch()


def test_a_damaged_archive_is_named(jar: Path) -> None:
    content = contents(jar)
    with zipfile.ZipFile(jar, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, member in content.items():
            archive.writestr(name, member)
    with zipfile.ZipFile(jar) as archive:
        info = archive.getinfo(CLASSES[0])
        begin = info.header_offset + 30 + len(info.filename)
    damaged = bytearray(jar.read_bytes())
    damaged[begin : begin + 40] = b"\xff" * 40
    jar.write_bytes(damaged)
    with pytest.raises(FrontendError, match="can't be read"):
        Frontend(jar)
