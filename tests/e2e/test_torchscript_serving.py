"""TorchScript archives without a model file in a real TorchServe."""

import pytest
import torch
from torch import nn
from torchserve_process import TorchServeError, handler_path, load, loaded, metric

CONFIG = """
minWorkers: 1
maxWorkers: 1
maxRetryTimeoutInSec: 1
startupTimeout: 120
pt2: openvino
handler: {openvino: {warmup: {inputs: [{shape: [4], dtype: float32}]}%s}}
"""


class Scripted(nn.Module):
    """A network with a loop and a branch on sizes, of which a trace would keep one way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the layers, each twice for more than one row."""
        for layer in self.layers:
            x = torch.relu(layer(x))
            if x.size(0) > 1:
                x = torch.relu(layer(x))
        return self.last(x)


class Counting(Scripted):
    """The same, with state, which no graph expresses."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Counts its calls."""
        self.calls += 1
        return self.last(x)


def test_a_scripted_model_alone_is_served(server, tmp_path):
    model, path = torch.jit.script(Scripted().eval()), tmp_path / "scripted.pt"
    model.save(str(path))
    with loaded(server, "scripted", handler=handler_path("tensor"), config=CONFIG % "", serialized_file=path) as name:
        rows = torch.randn(1, 4)
        answer = server.http.post(f"{server.inference_url}/predictions/{name}", json=rows.tolist())
        assert answer.status_code == 200, answer.text
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(answer.json()), model(rows), rtol=1e-4, atol=1e-5)
        assert metric(server, "openvino_coverage_ratio", name) == 1.0


def test_one_that_cannot_be_converted_is_refused_by_name(server, tmp_path):
    path = tmp_path / "counting.pt"
    torch.jit.script(Counting().eval()).save(str(path))
    strict = ", fallback: {allow: [], on_violation: refuse}"
    with pytest.raises(TorchServeError):
        load(server, "counting", handler=handler_path("tensor"), config=CONFIG % strict, serialized_file=path)
    log = "\n".join(line for line in server.log("model_log.log").splitlines() if "-counting_" in line)
    assert "prim::SetAttr" in log and "'calls'" in log and "test_torchscript_serving.py:" in log
