"""Other workers of the model: their number, and the state they publish."""

import json
import os
import subprocess
import sys

from serving_worker import WARMUP, save_weights

from torchserve_openvino.serving.siblings import FOLDER, Board, sibling_pids
from torchserve_openvino.tasks.tensor import TensorHandler

WAIT = "import sys; print('up', flush=True); sys.stdin.read()"


def test_children_of_one_process_in_one_folder_are_siblings(tmp_path) -> None:
    ask = "from torchserve_openvino.serving.siblings import sibling_pids; print(sibling_pids())"
    # The name of TorchServe's worker script.
    script = tmp_path / "model_service_worker.py"
    script.write_text("import sys\nexec(sys.argv[1])\n")
    other = tmp_path / "other"
    other.mkdir()
    started = [
        subprocess.Popen(
            [sys.executable, script, WAIT], cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for cwd in (tmp_path, tmp_path, other)
    ]
    try:
        assert all(process.stdout.readline() == "up\n" for process in started)
        found = [
            json.loads(subprocess.check_output([sys.executable, *program, ask], cwd=tmp_path, text=True))
            for program in ([script], ["-c"])
        ]
        assert {started[0].pid, started[1].pid} < set(found[0]) and len(found[0]) == 3
        # A process that runs another script is no worker and has no siblings.
        assert len(found[1]) == 1
    finally:
        for process in started:
            process.communicate("")


def test_what_the_system_does_not_tell_is_one_worker(tmp_path) -> None:
    assert sibling_pids(tmp_path) == [os.getpid()]


def test_the_board_shows_living_workers_only(tmp_path) -> None:
    board = Board(tmp_path)
    assert board.read() == []
    board.post({"summary": {"coverage": 1.0}})
    board.post({"summary": {"coverage": 0.5}})
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = tmp_path / FOLDER
    (folder / f"{ended.pid}.json").write_text("{}")
    (folder / f"{os.getppid()}.json").write_text("no json")
    assert board.read() == [{"pid": os.getpid(), "summary": {"coverage": 0.5}}]
    assert not (folder / f"{ended.pid}.json").exists()
    assert folder.stat().st_mode & 0o077 == 0


def test_a_folder_that_can_not_be_written_to_loses_nothing_else(tmp_path, caplog) -> None:
    (tmp_path / FOLDER).write_text("a file")
    board = Board(tmp_path)
    board.post({}), board.post({})
    assert board.read() == [] and len(caplog.records) == 1


def test_a_worker_counts_its_siblings_and_shows_them(archive, monkeypatch) -> None:
    monkeypatch.setattr("torchserve_openvino.serving.worker.worker.sibling_pids", lambda: [1, 2, 3, 4])
    monkeypatch.setattr("torchserve_openvino.serving.threads.usable_cores", lambda: 8)
    made = archive({"handler": {"openvino": {"warmup": WARMUP}}}, weights=save_weights)
    handler = TensorHandler()
    handler.initialize(made.context)
    report = handler.describe_handle()
    assert report["config"]["threads"]["workers"] == 4
    (worker,) = report["workers"]
    assert worker["pid"] == os.getpid() and worker["verified"] and worker["policy"]["holds"]
    made.handle(handler, b"[[1, 2, 3, 4]]")
    (worker,) = handler.describe_handle()["workers"]
    assert worker["counts"]["requests"] == 1 and worker["summary"]["coverage"] == 1.0
