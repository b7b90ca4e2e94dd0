"""Attention and what is joined to it, at the sizes of published models, against eager PyTorch."""

import subprocess
import sys

import openvino as ov
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import check

HAS_BF16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
needs_bf16 = pytest.mark.skipif(not HAS_BF16, reason="this CPU computes no bfloat16")
HEADS, KEYS = 2, 70

MASKS = {
    "float": lambda rows, keys: torch.randn(1, 1, rows, keys),
    "causal": lambda rows, keys: torch.ones(1, 1, rows, keys).tril(keys - rows) > 0,
    "left-padded": lambda rows, keys: (torch.arange(keys) >= 5).expand(1, 1, rows, keys),
    "closed rows": lambda rows, keys: (torch.arange(rows) >= rows // 2).view(1, 1, -1, 1).expand(1, 1, rows, keys),
    "padding": lambda rows, keys: (torch.arange(keys) < keys - 5).view(1, 1, 1, -1),
    "per head": lambda rows, keys: torch.randn(1, HEADS, rows, keys),
}


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask)


def inputs(rows: int, columns: int, head: int = 64, batch: int = 1, keys: int = KEYS) -> list[Tensor]:
    sizes = (rows, head), (keys, head), (keys, columns)
    return [torch.randn(batch, HEADS, *size) for size in sizes]


@pytest.mark.quick(rows=[1, 33], head=[64, 128], backend=["openvino"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head", [64, 96, 128, 256])
@pytest.mark.parametrize("rows", [1, 32, 33, 130])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
def test_masked_attention(mask: str, head: int, rows: int, backend: str) -> None:
    compiled = tov.compile(Attention().eval(), backend=backend)
    for _ in range(2):
        check(Attention().eval(), *inputs(rows, head, head), MASKS[mask](rows, KEYS), compiled=compiled)


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-1, -2) * 0.1).softmax(-1) @ value


COLUMNS = {
    "where": lambda y, column: torch.where(column > 0, y, 0.0),
    "added": lambda y, column: y + column,
    "gate": lambda y, column: y * column.sigmoid(),
    "of a relu": lambda y, column: y.relu() * column,
    "divided": lambda y, column: y / (column.abs() + 1),
    "largest": torch.maximum,
    "transposed": lambda y, column: (y * column).transpose(1, 2) + 1,
}


@pytest.mark.quick(rows=[33], columns=[64, 128, 192], dynamic=[False])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("columns", [64, 127, 128, 192, 256])
@pytest.mark.parametrize("rows", [32, 33, 128])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_behind_attention(name: str, rows: int, columns: int, dynamic: bool) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor, column: Tensor) -> Tensor:
        return COLUMNS[name](by_hand(query, key, value), column)

    check(function, *inputs(rows, columns), torch.randn(1, 1, rows, 1), dynamic=dynamic)


ROWS = {
    "added": lambda scores, row: scores + row,
    "subtracted": lambda scores, row: scores - row,
    "scaled": lambda scores, row: scores * row.sigmoid(),
    "divided": lambda scores, row: scores / (row.abs() + 1),
    "filled": lambda scores, row: scores.masked_fill(row > 1, -1e4),
    "added twice": lambda scores, row: scores + row + row.flip(-1),
}


@pytest.mark.quick(rows=[1, 33], shape=["row"], batch=[1], dynamic=[False])
@needs_bf16
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("shape", ["row", "one row each", "flat"])
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("name", ROWS)
def test_a_row_joined_with_scores_in_bfloat16(name: str, rows: int, shape: str, batch: int, dynamic: bool) -> None:
    def function(query: Tensor, key: Tensor, value: Tensor, row: Tensor) -> Tensor:
        return ROWS[name](query @ key.transpose(-1, -2) * 0.125, row).softmax(-1) @ value

    row = torch.randn({"row": (1, 1, 1, KEYS), "one row each": (batch, 1, 1, KEYS), "flat": (KEYS,)}[shape])
    compiled = tov.compile(function, dynamic=dynamic, options={"config": {"INFERENCE_PRECISION_HINT": "bf16"}})
    for _ in range(2):
        given = inputs(rows, 64, batch=batch)
        torch.testing.assert_close(compiled(*given, row), function(*given, row), atol=0.05, rtol=0.05)
    assert compiled.report.summary.coverage == 1.0


@needs_bf16
@pytest.mark.parametrize("keys", [1, 2, KEYS])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("rows", [1, 33])
def test_torch_s_own_attention_with_a_row_for_a_mask_in_bfloat16(rows: int, heads: int, keys: int) -> None:
    query, key, value = (torch.randn(1, heads, length, 64) for length in (rows, keys, keys))
    mask = torch.randn(1, 1, 1, keys)
    compiled = tov.compile(Attention().eval(), options={"config": {"INFERENCE_PRECISION_HINT": "bf16"}})
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(compiled(query, key, value, mask), expected, atol=0.05, rtol=0.05)


GATED = """
import sys, torch, torchserve_openvino as tov
from torch import nn
from torch.nn import functional as F

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 128, False), nn.Linear(64, 128, False), nn.Linear(128, 64, False)

    def forward(self, x):
        return self.down(getattr(F, sys.argv[1])(self.gate(x)) * self.up(x))

model, x = Gated().eval(), torch.randn(1, 33, 64)
hints = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": sys.argv[2]} | eval(sys.argv[4])
compiled = tov.compile(model, backend=sys.argv[3], options={"config": hints})
with torch.no_grad():
    torch.testing.assert_close(compiled(x), model(x), atol=0.05, rtol=0.05)
assert compiled.report.summary.coverage == 1.0
"""


@pytest.mark.quick(backend=["openvino"], activation=["silu"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("threads", "more"), [("1", "{}"), ("2", "{}"), ("2", "{'PERFORMANCE_HINT': 'THROUGHPUT'}")])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
def test_a_gated_product_in_bfloat16(backend: str, threads: str, more: str, activation: str) -> None:
    # In a process of its own, since the plugin may end it.
    subprocess.run([sys.executable, "-c", GATED, activation, threads, backend, more], check=True)


class Projected(nn.Module):
    """Attention of projected texts, as encoders and decoders have it."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.heads, width = heads, heads * size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self._split(self.query(x)), self._split(self.key(y)), self._split(self.value(y))
        plain = by_hand(query, key, value)
        back = by_hand(self._split(x).relu(), key, value).transpose(1, 2).flatten(2)
        same = by_hand(x.view(x.shape[0], self.heads, x.shape[1], -1).relu(), key, value).transpose(1, 2)
        return plain, back, same, F.scaled_dot_product_attention(query * 0.5, key, value).transpose(1, 2).flatten(2)


@pytest.mark.quick(heads=[12], hint=["f32", "bf16"], backend=["openvino"])
@pytest.mark.parametrize("backend", ["openvino", "openvino_ts", "export"])
@pytest.mark.parametrize("hint", ["f32", pytest.param("bf16", marks=needs_bf16)])
@pytest.mark.parametrize("heads", [2, 8, 12])
def test_as_many_queries_as_heads(heads: int, hint: str, backend: str) -> None:
    torch.manual_seed(0)
    model = Projected(heads, 64).eval()
    options = {"config": {"INFERENCE_PRECISION_HINT": hint}, "min_partition_us": 0}
    for queries, keys in ((heads, heads), (heads, 7), (7, heads)):
        torch._dynamo.reset()
        compiled = tov.compile(model, backend=backend, options=options)
        for _ in range(2):
            x, y = torch.randn(2, queries, heads * 64), torch.randn(2, keys, heads * 64)
            with torch.no_grad():
                for got, expected in zip(compiled(x, y), model(x, y), strict=True):
                    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 if hint == "f32" else 2e-2)
