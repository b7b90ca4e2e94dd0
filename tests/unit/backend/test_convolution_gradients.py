"""Gradients of convolutions are eager's, also after `import openvino.torch`, which registers a wrong decomposition."""

import subprocess
import sys

PROGRAM = """
import openvino.torch
import torch
from torch import nn

import torchserve_openvino as tov

for first in (nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 1), nn.Conv2d(2, 4, 3, 2, 1, groups=2), nn.ConvTranspose2d(2, 4, 3)):
    model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(4, 4, 1))
    compiled = tov.compile(model, options={"min_partition_us": 0})
    for wants in (False, True, True):
        found = []
        for run in (model, compiled):
            model.zero_grad()
            x = torch.arange(2.0 * 2 * 7 * 7).reshape(2, 2, 7, 7).sin().requires_grad_(wants)
            run(x).square().sum().backward()
            found.append([x.grad, *(weight.grad for weight in model.parameters())])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert {each.kind for each in compiled.report.fallbacks} <= {"unsupported_op"}, compiled.report.to_text()
    assert "aten.convolution.default" in str(compiled.report.to_dict()["graphs"]), compiled.report.to_text()
"""


def test_gradients_after_openvinos_import() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
