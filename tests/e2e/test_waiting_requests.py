"""Requests that wait for their batch to fill when the worker dies get an answer from TorchServe's patched frontend."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from torchserve_process import ROOT, TorchServeProcess, loaded

HANDLER = """
def handle(data, context):
    return None if data is None else ["answered" for _ in data]
"""
AWAITED = ROOT / "scripts" / "benchmarks" / "servers" / "awaited_handler.py"
# A batch of 4 waits 5 seconds for its last request, which does not come.
CONFIG = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 5000\nmaxRetryTimeoutInSec: 60\n"


@pytest.mark.parametrize("awaits", [False, True], ids=["batches", "asyncCommunication"])
def test_waiting_requests_are_answered(server: TorchServeProcess, awaits: bool) -> None:
    name = "waiting_async" if awaits else "waiting"
    config = f"{CONFIG}asyncCommunication: true\n" if awaits else CONFIG
    with loaded(server, name, handler=AWAITED if awaits else HANDLER, config=config), ThreadPoolExecutor() as pool:
        (worker,) = server.workers(name)

        def ask(_: int) -> httpx.Response:
            return httpx.post(f"{server.inference_url}/predictions/{name}", content=b"x", timeout=60, trust_env=False)

        answers = [pool.submit(ask, number) for number in range(2)]
        time.sleep(1.5)
        assert not any(answer.done() for answer in answers)
        os.kill(worker["pid"], signal.SIGKILL)
        found = [answer.result() for answer in answers]
        if awaits:
            assert [answer.status_code for answer in found] == [500, 500] and "Worker died" in found[0].text
        else:
            # By the worker that was started in its place.
            assert [(answer.status_code, answer.text) for answer in found] == [(200, "answered")] * 2
        server.wait_replaced(name, worker["pid"])
        assert ask(0).status_code == 200
