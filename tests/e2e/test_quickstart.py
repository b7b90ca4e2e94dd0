"""Runs scripts/quickstart.sh as a new user would: checks its output, and that it leaves nothing running."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from torchserve_process import ROOT

QUICKSTART = ROOT / "scripts" / "quickstart.sh"
SERVER_IS_UP = "org.pytorch.serve.ModelServer"


@pytest.fixture
def work(tmp_path):
    """The quickstart's folder; processes that name it in their command line belong to this test."""
    yield tmp_path
    left = processes_of(tmp_path)
    for process in left:
        process.kill()
    assert not left, f"left running: {left}"


def environment(work: Path, **more: str) -> dict[str, str]:
    return os.environ | {"QUICKSTART_VENV": sys.prefix, "QUICKSTART_DIR": str(work)} | more


def quickstart(work: Path, *arguments: str, timeout: float = 300, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [QUICKSTART, *arguments],
        env=environment(work, **more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def processes_of(work: Path) -> list[psutil.Process]:
    """Processes whose command line names `work`; the server's does, by its model store."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(work) in word for word in command):
            found.append(process)
    return found


def ports_of(*sockets: socket.socket) -> str:
    return ",".join(str(each.getsockname()[1]) for each in sockets)


def listener() -> socket.socket:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    return listening


def test_it_recognizes_the_cat_and_stops_its_server(work):
    done = quickstart(work, "--ports", "auto")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"The photo is: (.+), with probability (0\.\d+)", done.stdout)
    assert found, done.stdout
    assert found[1] == "Egyptian cat"
    # The same network in plain PyTorch gives 0.3554; OpenVINO runs it in f32.
    assert float(found[2]) == pytest.approx(0.3554, abs=0.01)
    assert re.search(r"coverage\W+100\.0%", done.stdout)
    assert "Fallbacks: none" in done.stdout
    assert done.stdout.count("done in") >= 2
    assert "\r" not in done.stdout, "a spinner belongs on terminals only"


@pytest.mark.slow
@pytest.mark.slow
def test_without_java_it_recognizes_the_cat_too(work):
    pytest.importorskip("uvicorn", reason="needs the extra serve")
    # What follows the installation, which must not change this environment.
    sockets = [listener() for _ in range(3)]
    ports = ports_of(*sockets)
    for each in sockets:
        each.close()
    command = [
        sys.executable,
        ROOT / "scripts" / "lib" / "quickstart.py",
        "--work",
        work,
        "--ports",
        ports,
        "--no-java",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"The photo is: Egyptian cat, with probability 0\.3[56]", done.stdout), done.stdout
    assert "`serve` with the model compiled" in done.stdout and "Fallbacks: none" in done.stdout


def test_keep_leaves_it_running_until_stop(work):
    done = quickstart(work, "--keep", QUICKSTART_PORTS="auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scripts/quickstart.sh --stop" in done.stdout
    url = re.search(r"http://127\.0\.0\.1:\d+(?=/predictions/)", done.stdout)
    assert url
    assert httpx.get(f"{url[0]}/ping", timeout=10).json() == {"status": "Healthy"}

    taken = httpx.URL(url[0]).port
    again = quickstart(work, "--ports", f"{taken},1,2")
    assert again.returncode == 1
    assert "scripts/quickstart.sh --stop" in again.stderr
    second = quickstart(work, "--keep", "--ports", "auto")
    assert second.returncode == 1
    assert "an earlier --keep left a server running" in second.stderr

    stopped = quickstart(work, "--stop")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert not processes_of(work)
    assert quickstart(work, "--stop").returncode == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_loads_stops_its_server(work, signum):
    running = subprocess.Popen(
        [QUICKSTART, "--ports", "auto"],
        env=environment(work),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 120
        while not any(SERVER_IS_UP in process.cmdline() for process in processes_of(work)):
            assert running.poll() is None, running.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.2)
        # A terminal sends SIGINT to its whole foreground group, a supervisor sends SIGTERM to the process.
        (os.killpg if signum == signal.SIGINT else os.kill)(running.pid, signum)
        output, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 128 + signum, output
    assert "Interrupted" in output
    assert not processes_of(work)


def test_a_signal_while_it_installs_ends_it(work):
    with listener() as index:  # accepts and never answers: pip waits
        running = subprocess.Popen(
            [QUICKSTART, "--ports", "auto"],
            env=environment(work, QUICKSTART_VENV=str(work / "venv"), **only_index(ports_of(index))),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            end = time.monotonic() + 60
            while not any("install" in process.cmdline() for process in processes_of(work)):
                assert running.poll() is None, running.communicate()[0]
                assert time.monotonic() < end
                time.sleep(0.1)
            running.terminate()
            output, _ = running.communicate(timeout=20)
        finally:
            running.kill()
    assert running.returncode == 128 + signal.SIGTERM, output
    assert "Interrupted" in output


def only_index(port: str) -> dict[str, str]:
    """pip settings that make this port the only package index."""
    return {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "PIP_DEFAULT_TIMEOUT": "30",
    }


def test_a_taken_port_is_named_and_left_alone(work):
    with listener() as first, listener() as second:
        free = socket.socket()
        free.bind(("127.0.0.1", 0))
        ports = ports_of(first, free, second)
        free.close()
        done = quickstart(work, "--ports", ports, timeout=30)
        assert done.returncode == 1
        for taken in (first, second):
            assert str(taken.getsockname()[1]) in done.stderr
        assert "taken" in done.stderr
        assert "--ports" in done.stderr
        assert not processes_of(work)
        with socket.create_connection(first.getsockname(), timeout=5):
            pass


@pytest.mark.parametrize("ports", ["8080", "8080,8081", "8080,8081,8082,8083", "a,b,c", "8080,,8082"])
def test_ports_that_are_no_three_numbers(work, ports):
    done = quickstart(work, "--ports", ports, timeout=30)
    assert done.returncode == 1
    assert "--ports takes three numbers" in done.stderr


def test_help_shows_examples_and_an_unknown_option_is_refused(work):
    shown = quickstart(work, "--help", timeout=30)
    assert shown.returncode == 0
    assert "Examples:" in shown.stdout
    refused = quickstart(work, "--prots", "auto", timeout=30)
    assert refused.returncode == 2
    assert "unknown option --prots" in refused.stderr


def test_without_a_network_it_says_so(work):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        settings = only_index(ports_of(closed))
        done = quickstart(work, "--ports", "auto", QUICKSTART_VENV=str(work / "venv"), **settings)
    assert done.returncode == 1, done.stdout
    assert "no network" in done.stderr
    assert "install.log" in done.stderr


def test_without_python_it_says_so(work):
    tools = work / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "mkdir", "env"):
        (tools / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    done = quickstart(work, PATH=str(tools), PYTHON="", QUICKSTART_VENV=str(work / "venv"))
    assert done.returncode == 1
    assert "no Python 3.10 or newer" in done.stderr
