"""`torchserve-openvino ready` against TorchServe."""

from pathlib import Path

from commands import run
from torchserve_process import TorchServeProcess, handler_path, loaded

from network import CONFIG, NETWORK
from torchserve_openvino.cli.reports.readiness import ServerAddress, not_ready

FOREIGN = """
from ts.torch_handler.base_handler import BaseHandler
class Foreign(BaseHandler):
    def preprocess(self, data):
        return data[0]["body"]["x"][0]
"""


def test_ready_tells_the_truth_about_torchserve(server: TorchServeProcess, weights: Path, tmp_path: Path) -> None:
    where = ServerAddress(server.inference_url, server.management_url)
    files = {"handler": handler_path("tensor"), "model_file": NETWORK, "serialized_file": weights}
    with loaded(server, "probed", config=CONFIG, **files):
        assert not_ready(where, "probed", 10) == "" == not_ready(where, "probed/1.0", 10)
        options = ("--url", server.inference_url, "--management", server.management_url)
        done = run("torchserve-openvino ready probed --once", tmp_path, *options)
        assert done.returncode == 0 and done.stdout.strip() == "probed: ready", done.stderr
        report = server.describe("probed")
        assert report["serving"]["counts"].get("requests", 0) == 0
        # TorchServe's /ping stays healthy without any worker.
        url = f"{server.management_url}/models/probed"
        assert server.http.put(url, params={"min_worker": 0, "max_worker": 0, "synchronous": "true"}).is_success
        problem = not_ready(where, "probed", 10)
        assert problem.startswith("probed: 503: ") and "no worker" in problem, problem
    assert "404" in not_ready(where, "probed", 10)
    with loaded(
        server,
        "foreign",
        config="minWorkers: 1\nmaxWorkers: 1\n",
        handler=FOREIGN,
        model_file=NETWORK,
        serialized_file=weights,
    ):
        # At once, and with one request to the handler at most.
        done = run("torchserve-openvino ready foreign --timeout 60", tmp_path, *options)
        assert done.returncode == 1 and "its handler is not one of this package's" in done.stderr, done.stderr
    assert not_ready(ServerAddress("http://127.0.0.1:9", server.management_url), "probed", 10) == (
        "no server answers at http://127.0.0.1:9 (--url)"
    )
