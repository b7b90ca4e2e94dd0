"""Functions that are accurate where their results are small: relative to the result, not to 1."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchserve_openvino as tov

SIZES = [0.0, 1e-30, 1e-20, 1e-10, 1e-7, 1e-5, 1e-3, 0.05, 0.3, 0.5, 0.7, 1, 2, 3, 5, 8, 10, 12, 15, 17, 20, 30, 50, 80]
X = torch.tensor([sign * size for size in SIZES for sign in (1, -1)])
ENDS = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e4, -1e4, 1e30, -1e30])
ZERO = torch.zeros(())
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softplus": F.softplus,
    "softplus with a factor": lambda x: F.softplus(x, 2.0, 5.0),
    "logsigmoid": F.logsigmoid,
    "log1p": lambda x: torch.log1p(x.abs()),
    "log1p below 0": lambda x: torch.log1p(-x.abs() / 100),
    "expm1": lambda x: x.expm1(),
    "sigmoid": torch.sigmoid,
    "erfc": torch.erfc,
    "logaddexp": lambda x: torch.logaddexp(x, ZERO),
    "log_softmax": lambda x: torch.stack([x, x * 0], -1).log_softmax(-1)[..., 0],
    "elu": lambda x: F.elu(x, 0.7),
    "celu": lambda x: F.celu(x, 0.7),
    "selu": F.selu,
    "mish": F.mish,
    "cross entropy": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none"),
    "xlog1py": lambda x: torch.special.xlog1py(x, x.abs()),
}


@pytest.mark.quick(dynamic=[False])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_small_results_keep_their_digits(name: str, dynamic: bool) -> None:
    function = FUNCTIONS[name]
    compiled = tov.compile(function, dynamic=dynamic, options={"min_partition_us": 0})
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), function(X), rtol=2e-5, atol=1e-36)
        torch.testing.assert_close(compiled(ENDS), function(ENDS), rtol=2e-5, atol=0, equal_nan=True)
    assert compiled.report.summary.coverage == 1.0, compiled.report.to_text()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["softplus", "logsigmoid", "log1p", "erfc", "elu", "celu", "selu", "mish"])
def test_narrow_floats(name: str, dtype: torch.dtype) -> None:
    function, x = FUNCTIONS[name], X.to(dtype)
    compiled = tov.compile(function, dynamic=False, options={"min_partition_us": 0})
    with torch.no_grad():
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(compiled(x), function(x), rtol=tolerance, atol=1e-6)
    assert compiled.report.summary.coverage == 1.0, compiled.report.to_text()


@pytest.mark.parametrize("backend", ["openvino", "openvino_ts"])
@pytest.mark.parametrize("name", ["softplus", "elu", "mish", "log1p"])
def test_gradients(name: str, backend: Any) -> None:
    function = FUNCTIONS[name]
    compiled = tov.compile(function, dynamic=False, backend=backend, options={"min_partition_us": 0})
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    function(x).sum().backward()
    compiled(y).sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("alpha", [-1.0, -0.5, 0.7, 3.0])
def test_celu_of_any_alpha(alpha) -> None:
    x = torch.tensor([-20.0, -10.0, -3.0, -1e-4, 0.0, 1e-4, 1.0, 30.0])
    torch.testing.assert_close(tov.compile(lambda x: F.celu(x, alpha))(x), F.celu(x, alpha), rtol=1e-5, atol=0)
