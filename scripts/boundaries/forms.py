"""Small graphs, each with one size that varies, for which the plugin chooses kernels and fusions.

There is one for each fusion of the plugin that this package works around or that published models meet, for each pass
over the converted model, and for each operator with a conversion of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Build = Callable[[int], tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]]


@dataclass(frozen=True)
class Form:
    """A graph with one open size.

    Attributes:
        build: Called with the size; returns the model and a function that draws its inputs.
        covers: The fusion, pass or conversion that it is for.
        largest: Largest size that is tried.
        tolerance: Allowed difference in float32, relative to the largest value.
        also: Further sizes to compare, which equal another one of the form: kernels may confuse them.
    """

    build: Build
    covers: str
    largest: int = 1025
    tolerance: float = 1e-4
    also: tuple[int, ...] = ()


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleDict(parts)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*self.parts.values(), *inputs)


def _form(function: Callable[..., Tensor], *shapes: Callable[[int], tuple[int, ...]], **parts: object) -> Build:
    """Returns the build of a function of normally distributed inputs; parts are modules, made for each size."""

    def build(size: int) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
        modules = {name: make(size) for name, make in parts.items()}  # type: ignore[operator]
        return Call(function, **modules).eval(), lambda: tuple(torch.randn(shape(size)) for shape in shapes)

    return build


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


def _heads(length: int | None = None, width: int | None = None) -> Callable[[int], tuple[int, ...]]:
    return lambda n: (1, 2, length or n, width or n)


def _norm(channels: int) -> nn.Module:
    norm = nn.BatchNorm2d(channels)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return norm


FORMS: dict[str, Form] = {
    "attention: head": Form(_form(_attention, _heads(64), _heads(64), _heads(64)), "attention's kernel", 513),
    "attention: length": Form(_form(_attention, *[_heads(None, 64)] * 3), "attention's kernel", 1025),
    "attention: value's width behind a column": Form(
        _form(
            lambda q, k, v, c: _attention(q, k, v) * c,
            _heads(64, 64),
            _heads(64, 64),
            _heads(64),
            lambda n: (1, 1, 64, 1),
        ),
        "attention_operands: columns",
        513,
    ),
    "attention: queries behind a column": Form(
        _form(
            lambda q, k, v, c: torch.where(c > 0, _attention(q, k, v), 0.0),
            _heads(None, 64),
            _heads(64, 64),
            _heads(64, 192),
            lambda n: (1, 1, n, 1),
        ),
        "attention_operands: columns",
        513,
    ),
    "attention: keys beside a row": Form(
        _form(
            F.scaled_dot_product_attention,
            _heads(1, 64),
            _heads(None, 64),
            _heads(None, 64),
            lambda n: (1, 1, 1, n),
        ),
        "attention_operands: rows",
    ),
    "attention: several users": Form(
        _form(lambda q, k, v: (y := _attention(q, k, v)) + y.relu() * 2, *[_heads(33)] * 3), "kernel_fusions", 257
    ),
    "attention: projected queries of 12 heads": Form(
        _form(
            lambda layer, x, k, v: _attention(layer(x).view(2, -1, 12, 16).transpose(1, 2), k, v),
            lambda n: (2, n, 192),
            lambda n: (2, 12, 20, 16),
            lambda n: (2, 12, 20, 16),
            layer=lambda n: nn.Linear(192, 192),
        ),
        "attention_operands: exchanges",
        65,
        also=(12,),
    ),
    "gated product": Form(
        _form(
            lambda gate, up, down, x: down(F.silu(gate(x)) * up(x)),
            lambda n: (1, 33, n),
            gate=lambda n: nn.Linear(n, 2 * n, False),
            up=lambda n: nn.Linear(n, 2 * n, False),
            down=lambda n: nn.Linear(2 * n, n, False),
        ),
        "gated_products",
    ),
    "two layers and a sum": Form(
        _form(
            lambda first, second, x: torch.tanh(second(first(x.sin()).relu())) + x.sin(),
            lambda n: (8, n),
            first=lambda n: nn.Linear(n, n),
            second=lambda n: nn.Linear(n, n),
        ),
        "fused_chains",
    ),
    "a weight in two orientations": Form(
        _form(lambda layer, x: layer(x) @ layer.weight, lambda n: (4, n), layer=lambda n: nn.Linear(n, n, False)),
        "weight_packing",
    ),
    "linear, gelu": Form(
        _form(lambda layer, x: F.gelu(layer(x)), lambda n: (33, n), layer=lambda n: nn.Linear(n, 2 * n)),
        "FullyConnected",
    ),
    "linear: rows": Form(
        _form(lambda layer, x: layer(x).relu(), lambda n: (n, 256), layer=lambda n: nn.Linear(256, 256)),
        "FullyConnected",
    ),
    "convolution, norm, sum, activation": Form(
        _form(
            lambda conv, norm, x, y: F.relu(norm(conv(x)) + y),
            lambda n: (1, n, 14, 14),
            lambda n: (1, n, 14, 14),
            conv=lambda n: nn.Conv2d(n, n, 3, padding=1, bias=False),
            norm=_norm,
        ),
        "convolution with post-operators",
        513,
    ),
    "pixels, norm, activation": Form(
        _form(
            lambda conv, norm, x: F.hardswish(norm(conv(x))),
            lambda n: (2, n, 7, 7),
            conv=lambda n: nn.Conv2d(n, n, 1, bias=False),
            norm=_norm,
        ),
        "convolution of single pixels",
    ),
    "patches of 8 x 8: channels": Form(
        _form(lambda conv, x: conv(x), lambda n: (8, n, 16, 24), conv=lambda n: nn.Conv2d(n, 32, 8, 8)),
        "convolution_kernels: blocks",
        97,
    ),
    "patches of 4 x 4: width": Form(
        _form(lambda conv, x: conv(x), lambda n: (8, 48, 40, n + 3), conv=lambda n: nn.Conv2d(48, 64, 4, 4)),
        "convolution_kernels: one column",
        33,
    ),
    "padded pixels, strided": Form(
        _form(
            lambda conv, x: conv(x.relu()),
            lambda n: (1, n, 9, 9),
            conv=lambda n: nn.Conv2d(n, 16, 1, stride=2, padding=1),
        ),
        "kernel_fusions: strides",
        257,
    ),
    "depthwise": Form(
        _form(
            lambda conv, x: F.silu(conv(x)),
            lambda n: (1, n, 14, 14),
            conv=lambda n: nn.Conv2d(n, n, 5, padding=2, groups=n),
        ),
        "GroupConvolution",
    ),
    "transposed convolution": Form(
        _form(lambda conv, x: conv(x).relu(), lambda n: (1, n, 7, 7), conv=lambda n: nn.ConvTranspose2d(n, 8, 4, 2, 1)),
        "Deconvolution",
        513,
    ),
    "convolution along a length": Form(
        _form(
            lambda conv, x: F.gelu(conv(x)),
            lambda n: (1, 32, n),
            conv=lambda n: nn.Conv1d(32, 64, 3, stride=2, padding=1),
        ),
        "open_lengths",
        4097,
    ),
    "squeeze and excite": Form(
        _form(
            lambda down, up, x: x * torch.sigmoid(up(F.relu(down(x.mean((2, 3)))))).unsqueeze(-1).unsqueeze(-1),
            lambda n: (1, n, 14, 14),
            down=lambda n: nn.Linear(n, 8),
            up=lambda n: nn.Linear(8, n),
        ),
        "reductions and broadcasts",
    ),
    "mean of few channels": Form(
        _form(lambda x: (p := F.avg_pool2d(x, 2)) - p.mean((0, 2, 3), keepdim=True), lambda n: (2, n, 8, 8)),
        "kernel_fusions: means",
        65,
    ),
    "reduction behind which numbers follow": Form(
        _form(lambda x: x.mean(-1) / 3 + torch.arange(5.0), lambda n: (2, 5, n)), "kernel_fusions: reductions", 4097
    ),
    "sum": Form(_form(lambda x: x.sum(-1), lambda n: (3, n)), "reductions", 65537),
    "softmax": Form(_form(lambda x: x.softmax(-1), lambda n: (33, n)), "Softmax", 4097),
    "layer norm": Form(
        _form(lambda norm, x, y: norm(x + y), lambda n: (33, n), lambda n: (33, n), norm=nn.LayerNorm), "MVN"
    ),
    "RMS norm": Form(
        _form(lambda norm, x: norm(x) * 2, lambda n: (1, 33, n), norm=lambda n: nn.RMSNorm(n, eps=1e-6)), "RMSNorm"
    ),
    "group norm, activation": Form(
        _form(lambda norm, x: F.silu(norm(x)), lambda n: (1, 32, n, 7), norm=lambda n: nn.GroupNorm(8, 32)),
        "group norm",
        257,
    ),
    "rotary positions": Form(
        _form(
            lambda x, c, s: x * c + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * s,
            lambda n: (1, 2, 33, 2 * n),
            lambda n: (1, 1, 33, 2 * n),
            lambda n: (1, 1, 33, 2 * n),
        ),
        "RoPE",
        257,
    ),
    "tiny matrices": Form(
        _form(lambda x, y: (x @ y).relu() * torch.arange(1.0, x.shape[-1] + 1), lambda n: (n, n), lambda n: (n, n)),
        "kernel_fusions: products",
        129,
    ),
    "absolute value of a concatenation": Form(
        _form(lambda x, y: torch.cat((x, y), -1).abs() + torch.cat((x, y), -1), lambda n: (3, n), lambda n: (3, n)),
        "kernel_fusions: Abs",
        257,
    ),
    "product seen as a scalar": Form(
        _form(lambda x, w: (x @ w).view(()), lambda n: (1, n), lambda n: (n, 1)), "Squeeze"
    ),
    "max pooling": Form(_form(lambda x: F.max_pool2d(x, 3, 2, 1), lambda n: (1, n, 14, 14)), "MaxPool"),
    "resize": Form(
        _form(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), lambda n: (1, n, 14, 14)),
        "Interpolate",
        257,
    ),
    "transpose": Form(_form(lambda x: x.transpose(1, 2).contiguous() + 1, lambda n: (1, n, 33, 8)), "Transpose"),
    "cumulative sum": Form(_form(lambda x: x.cumsum(-1), lambda n: (2, n)), "CumSum", 65537),
    "top k": Form(_form(lambda x: x.topk(1)[0], lambda n: (3, n)), "TopK", 4097),
    "embedding": Form(
        _form(
            lambda table, x: table((x.abs() * 3).long().clamp(0, 9)),
            lambda n: (4, 9),
            table=lambda n: nn.Embedding(10, n),
        ),
        "Gather",
    ),
    "unfold": Form(_form(lambda x: x.unfold(-1, 1, 1), lambda n: (2, n)), "aten.unfold"),
    "replication": Form(
        _form(lambda x: F.pad(x, (1, 2), mode="replicate"), lambda n: (2, 3, n)), "aten.replication_pad1d"
    ),
    "replication of images": Form(
        _form(lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"), lambda n: (1, 3, n, 4)), "aten.replication_pad2d", 257
    ),
    "remainder": Form(
        _form(lambda x, y: torch.fmod(x, y.abs() + 0.5), lambda n: (n,), lambda n: (n,)), "aten.fmod", 4097
    ),
    "diagonal": Form(_form(lambda x: x.diagonal(), lambda n: (n, n)), "aten.diagonal", 257),
    "written by index": Form(
        _form(lambda x, y: x.index_put((torch.arange(2),), y), lambda n: (4, n), lambda n: (2, n)), "aten.index_put"
    ),
    "reduced by index": Form(
        _form(
            lambda x, y: x.scatter_reduce(0, torch.zeros(3, y.shape[1], dtype=torch.int64), y, "amax"),
            lambda n: (2, n),
            lambda n: (3, n),
        ),
        "aten.scatter_reduce",
    ),
}
