"""Functions whose small results OpenVINO computes as differences of larger numbers, so that they lose their digits."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from torchserve_openvino.ops.rule_registry import INSTEAD, Rule, decomposition
from torchserve_openvino.ops.rules.elementwise import as_floats

aten = torch.ops.aten
# W. H. Press et al., "Numerical Recipes", `erfcc`: relative errors below 1.2e-7.
_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223,
    0.17087277,
)  # fmt: skip
_NO_DIGITS = "OpenVINO takes the logarithm of 1 + x: small values lose all digits" + INSTEAD


def _polynomial(x: Tensor, factors: tuple[float, ...]) -> Tensor:
    return functools.reduce(
        lambda total, factor: total * x + factor, reversed(factors[:-1]), x.new_full((), factors[-1])
    )


@decomposition(aten.log1p.default, rule=Rule(banned=_NO_DIGITS))
def _log1p(x: Tensor) -> Tensor:
    """Computes 2 atanh(x / (2 + x)) by its series for small values, and log(1 + x) for others."""
    if x.is_complex():
        return NotImplemented
    x = as_floats(x)
    s = x / (x + 2)
    series = 2 * s * _polynomial(s * s, tuple(1 / (2 * k + 1) for k in range(8)))
    return torch.where(x.abs() < 0.5, series, torch.log(x + 1))


@decomposition(aten.softplus.default)
def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x * beta
    # OpenVINO's exponential of NaN may be a number.
    return torch.where((scaled > threshold) | x.isnan(), x, torch.log1p(torch.exp(scaled)) / beta)


@decomposition(aten.mish.default)
def _mish(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


def _exponential_unit(x: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    """Computes exp(x) - 1 below 0 as 2 tanh(x/2) / (1 - tanh(x/2)), which keeps the digits of small values."""
    half = torch.tanh(x * (input_scale / 2))
    return torch.where(x > 0, x * scale, 2 * alpha * scale * half / (1 - half))


@decomposition(aten.elu.default)
def _elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return _exponential_unit(x, alpha, scale, input_scale)


@decomposition(aten.celu.default)
def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    if alpha < 0:
        # The exponent is positive where x is negative.
        return torch.where(x > 0, x, alpha * torch.expm1(x / alpha))
    return _exponential_unit(x, alpha, 1, 1 / alpha)


@decomposition(aten.selu.default)
def _selu(x: Tensor) -> Tensor:
    return _exponential_unit(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1)


@decomposition(
    aten.erfc.default, rule=Rule(banned="OpenVINO subtracts erf from 1: small values lose all digits" + INSTEAD)
)
def _erfc(x: Tensor) -> Tensor:
    x = as_floats(x)
    size = x.abs()
    t = 1 / (size / 2 + 1)
    return torch.where(x > 0.5, t * torch.exp(_polynomial(t, _ERFC) - size * size), 1 - torch.erf(x))
