"""Models that must not be served: the worker does not become READY, and its log says what is wrong and where."""

import pytest
from commands import run
from torchserve_process import TorchServeError, handler_path, load

LIMITS = "minWorkers: 1\nmaxWorkers: 1\nmaxRetryTimeoutInSec: 1\nstartupTimeout: 120\n"
WARMUP = "warmup: {inputs: [{shape: [4], dtype: float32}]}"

DIGAMMA = """
import torch
class Digamma(torch.nn.Module):
    def forward(self, x):
        return torch.digamma(x.abs() + 1) * 2
"""

IDENTITY = """
import torch
class Identity(torch.nn.Module):
    def forward(self, x):
        return x + 1
"""


def refusal(server, name: str, **arguments) -> str:
    """Returns the worker's log of a model that must not load."""
    with pytest.raises(TorchServeError):
        load(server, name, handler=handler_path("tensor"), **arguments)
    assert server.http.get(f"{server.inference_url}/ping").status_code == 200
    lines = server.log("model_log.log").splitlines()
    return "\n".join(line for line in lines if f"-{name}_" in line)


def test_a_misspelt_key_names_itself_and_the_nearest_valid_one(server):
    config = LIMITS + f"pt2: {{compile: {{enable: true, backend: openvino}}}}\nhandler:\n  openvino:\n    {WARMUP}\n"
    config += "    verfy: {against: eager}\n"
    log = refusal(server, "misspelt", config=config, model_file=IDENTITY)
    assert "ConfigError" in log
    assert "verfy" in log
    assert "verify" in log
    assert "model-config.yaml:9" in log


def test_an_unknown_property_of_openvino_is_refused(server):
    options = "options: {config: {PERFORMANCE_HNT: LATENCY}}"
    config = LIMITS + f"pt2: {{compile: {{enable: true, backend: openvino, {options}}}}}\n"
    log = refusal(server, "property", config=config, model_file=IDENTITY)
    assert "PERFORMANCE_HNT" in log
    assert "PERFORMANCE_HINT" in log


def test_a_strict_model_with_an_unsupported_op_is_refused(server):
    strict = "fallback: {allow: [], min_coverage: 1.0, on_violation: refuse}"
    config = LIMITS + f"pt2: openvino\nhandler: {{openvino: {{{WARMUP}, {strict}}}}}\n"
    log = refusal(server, "strict", config=config, model_file=DIGAMMA)
    assert "PolicyViolationError" in log
    assert "aten.digamma.default" in log
    # The report tells what ran where all the same, and leads to the cause.
    options = ["--management", server.management_url]
    report = run("torchserve-openvino report strict", server.logs, *options)
    assert report.returncode == 1 and "aten.digamma.default" in report.stdout, report.stderr
    assert "PolicyViolationError" in report.stdout and "why strict" in report.stdout
    why = run("torchserve-openvino why strict --logs .", server.logs, *options)
    assert why.returncode == 1 and "cause: PolicyViolationError" in why.stdout
