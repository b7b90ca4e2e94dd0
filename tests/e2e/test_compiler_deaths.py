"""A worker that OpenVINO's compiler ends: the next one answers, and the log, the report and `why` say what happened."""

import json
import subprocess
import sys

import numpy as np
import torch
from torchserve_process import archive

from deadly_model import HANDLER, MODEL

LIMITS = "minWorkers: 1\nmaxWorkers: 1\nstartupTimeout: 120\n"
CONFIG = LIMITS + "pt2: openvino\nhandler: {openvino: {warmup: {inputs: [{shape: [64], dtype: float32}]}}}\n"


def why(server) -> dict:
    command = [sys.executable, "-m", "torchserve_openvino.cli", "why", "dies", "--json", "--logs", str(server.logs)]
    command += ["--management", server.management_url]
    return json.loads(subprocess.run(command, check=False, capture_output=True, text=True).stdout)


def test_the_second_worker_answers_where_the_compiler_ended_the_first(server):
    packed = archive(server, "dies", handler=HANDLER, config=CONFIG, model_file=MODEL)
    assert server.register(packed, "dies").status_code == 500
    state = why(server)
    assert not state["served"] and "process ended" in state["cause"]["text"], state
    assert "the next one finds that out" in state["cause"]["fix"]

    answer = server.register(packed, "dies")
    assert answer.status_code == 200, f"{answer.text}\n{server.log_tail(100)}"
    rows = np.linspace(-1, 1, 64, dtype=np.float32)[None]
    answer = server.predict("dies", json.dumps(rows.tolist()).encode(), "application/json")
    scope: dict = {}
    exec(MODEL, scope)
    with torch.no_grad():
        expected = scope["Deadly"]().eval()(torch.from_numpy(rows))
    torch.testing.assert_close(torch.tensor(answer.json()), expected)

    (note,) = [note for note in server.describe("dies")["notes"] if "compiler died" in note]
    assert "(SIGSEGV) compiling graph 0 / openvino_0" in note and "without fusion" in note
    state = why(server)
    assert state["served"] and state["died"] == [note]
    log = server.log("model_log.log")
    assert "OpenVINO's compiler died: process " in log and "2x MatMul" in log
    server.http.delete(f"{server.management_url}/models/dies")
