"""Processes that die during a put, and processes that compete for the same entry."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import crash_writer
import pytest
from cache_helpers import FILES, child, content, key, put

from torchserve_openvino.cache.storage import locks
from torchserve_openvino.cache.storage.store import Store

pytestmark = pytest.mark.timeout(100)


@pytest.mark.parametrize("how", ["fresh", "older", "damaged", "full"])
def test_killed_before_each_call_to_the_system(tmp_path, how):
    script = [sys.executable, crash_writer.__file__, str(tmp_path), how]
    done = subprocess.run(script, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    died_at = done.stdout.split()
    # The last child finished its put.
    roots = [tmp_path / f"{step:03d}" for step in range(1, len(died_at) + 2)]
    assert roots[-1].exists() and len(roots) > 50
    counts = Counter(died_at)
    assert counts["replace"] >= 3 and counts["fsync"] >= 6 and counts["write"] >= 3, counts
    outcomes = Counter()
    for root in roots:
        store = Store(root)
        entry = store.get("partition", key(1))
        if entry is None:
            outcomes["absent"] += 1
        elif entry.body == {"new": True}:
            outcomes["new"] += 1
            assert content(entry) == crash_writer.NEW
        else:
            outcomes["old"] += 1
            assert how == "damaged" or content(entry) == FILES
        assert store.events.damaged == 0
        assert how == "damaged" or [problem for problem in store.verify() if problem.kind] == []
        # What the dead process left behind blocks nothing, and a new put repairs the entry.
        started = time.monotonic()
        crash_writer.write(root, how)
        assert time.monotonic() - started < 2
        assert content(Store(root).get("partition", key(1))) == crash_writer.NEW
        assert [problem for problem in store.verify() if problem.kind] == []
        assert sum(1 for _ in (root / "tmp").iterdir()) <= 1
    before = "absent" if how == "fresh" else "old"
    assert outcomes.keys() == {before, "new"} and outcomes[before] > 10, outcomes


WORKER = """
import os, sys, time
from pathlib import Path
from torchserve_openvino.cache.storage.store import Store
root, log = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
store = Store(root)
with store.lock("blob", "a" * 64) as held:
    entry = store.get("blob", "a" * 64)
    if entry is None:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, b"built\\n")
        time.sleep(0.2)
        entry = store.put("blob", "a" * 64, fields={}, body={}, files={"x": b"y" * 100_000})
    assert entry.read("x") == b"y" * 100_000
    print(held, store.events.damaged, store.events.write_failures, store.events.lock_waits, flush=True)
"""


def eight(code: str, tmp_path: Path) -> list[list[str]]:
    """Runs code in eight processes that start their work together; returns the words that each prints at its end."""
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(tmp_path / "log")]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        return [process.communicate(timeout=60)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_eight_processes_do_the_work_once(tmp_path):
    lines = eight(WORKER, tmp_path)
    assert (tmp_path / "log").read_text() == "built\n"
    assert [line[:3] for line in lines] == [["True", "0", "0"]] * 8
    assert sum(int(line[3]) for line in lines) >= 1


def test_eight_processes_without_a_lock_do_no_harm(tmp_path):
    """All write the same entry at once, as they may after a lock timeout."""
    code = WORKER.replace('with store.lock("blob", "a" * 64) as held:', "held = True\nif True:")
    lines = eight(code, tmp_path)
    assert (tmp_path / "log").read_text().count("built\n") > 1
    assert [line[:3] for line in lines] == [["True", "0", "0"]] * 8
    store = Store(tmp_path / "cache")
    assert store.verify() == [] and store.size()[:2] == (1, 1) and not list((store.root / "tmp").iterdir())


HOLDER = """
import sys, time
from pathlib import Path
from torchserve_openvino.cache.storage.store import Store
with Store(Path(sys.argv[1])).lock("call", "b" * 64) as held:
    print(held, flush=True)
    time.sleep(60)
"""


def test_a_lock_that_another_process_keeps(root, caplog, monkeypatch):
    monkeypatch.setattr("torchserve_openvino.cache.storage.locks.SILENT_SECONDS", 0.2)
    store = Store(root, lock_seconds=0.6)
    with child(HOLDER, root) as process:
        assert process.stdout.readline() == "True\n"
        started = time.monotonic()
        with store.lock("call", "b" * 64) as held:
            assert held is False
        assert 0.5 < time.monotonic() - started < 3
        with store.lock("call", "c" * 64) as held:
            assert held is True
        assert (store.events.lock_waits, store.events.lock_timeouts) == (1, 1)
        said = [record.getMessage() for record in caplog.records if record.name.startswith("torchserve_openvino")]
        assert [text.partition(",")[0].partition(" after")[0] for text in said] == [
            "Waiting for another process that builds call bbbbbbbbbbbb",
            "Another process still builds call bbbbbbbbbbbb",
        ]


def test_a_killed_holder_frees_the_lock(root, caplog):
    store = Store(root, lock_seconds=30)
    with child(HOLDER, root) as process:
        assert process.stdout.readline() == "True\n"
        threading.Timer(0.3, process.send_signal, [signal.SIGKILL]).start()
        started = time.monotonic()
        with store.lock("call", "b" * 64) as held:
            assert held is True
        assert time.monotonic() - started < 5
    assert (store.events.lock_waits, store.events.lock_timeouts) == (1, 0)


def test_no_waiting_at_all(root):
    with child(HOLDER, root) as process:
        assert process.stdout.readline() == "True\n"
        started = time.monotonic()
        with Store(root, lock_seconds=0).lock("call", "b" * 64) as held:
            assert held is False
        assert time.monotonic() - started < 1


def test_threads_of_one_process_exclude_each_other(store):
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        with store.lock("call", key(1)) as held:
            assert held
            inside += 1
            most = max(most, inside)
            time.sleep(0.02)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (most, inside) == (1, 0)


def test_an_error_inside_frees_the_lock_and_is_the_callers(store):
    with pytest.raises(KeyError), store.lock("call", key(1)):
        raise KeyError("mine")
    with store.lock("call", key(1)) as held:
        assert held


def test_a_stopped_process_that_holds_the_commit_lock_does_not_stop_others(root, monkeypatch):
    real = locks.hold
    monkeypatch.setattr(locks, "commit_lock", lambda root, seconds=0.3: real(root, "commit", seconds))
    monkeypatch.setattr("torchserve_openvino.cache.storage.store.commit_lock", locks.commit_lock)
    store = Store(root)
    code = HOLDER.replace('Store(Path(sys.argv[1])).lock("call", "b" * 64)', 'commit_lock(Path(sys.argv[1]))').replace(
        "from pathlib", "from torchserve_openvino.cache.storage.locks import commit_lock\nfrom pathlib"
    )  # fmt: skip
    root.mkdir(exist_ok=True)
    with child(code, root) as process:
        assert process.stdout.readline() == "True\n"
        put(store)
        assert content(store.get("partition", key(1))) == FILES


def test_a_forked_child_hashes_on_its_own(store, tmp_path):
    put(store, files={"big": bytes(8 * 2**20)})
    child_pid = os.fork()
    if child_pid == 0:
        code = 1
        try:
            put(Store(store.root), 2, files={"big": b"1" * (8 * 2**20)})
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + 20
    while (found := os.waitpid(child_pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.02)
    if found[0] == 0:
        os.kill(child_pid, signal.SIGKILL)
        os.waitpid(child_pid, 0)
    assert found[0] and os.waitstatus_to_exitcode(found[1]) == 0
    assert Store(store.root).get("partition", key(2)) is not None
