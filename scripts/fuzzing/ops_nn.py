"""Layers: linear, convolution, norms, pooling, interpolation, recurrent layers, losses."""

from __future__ import annotations

import torch

from fuzzing.context import Context
from fuzzing.draft import Draft, Val
from fuzzing.registry import at_least, dims, floating, like, op, size_name, wide_value


def _dtype(value: Val) -> str:
    return "" if value.dtype is torch.float32 else f", dtype={value.dtype}"


@op(3.0)
def linear(g: Context) -> Draft:
    value = g.take(floating, at_least(1), lambda v: v.shape[-1] > 0)
    bias = ", bias=False" if g.chance(0.2) else ""
    name = g.attribute("m", f"torch.nn.Linear({value.shape[-1]}, {g.choice([1, 3, 4])}{bias}{_dtype(value)})")
    return Draft(f"self.{name}({{0}})", [value], uses=(name,))


@op(1.0)
def mlp(g: Context) -> Draft:
    """Two linear layers, which OpenVINO fuses into one kernel for two-dimensional inputs."""
    value = g.take(floating, at_least(2), lambda v: v.shape[-1] > 0)
    last, kind = value.shape[-1], _dtype(value)
    layers = [f"torch.nn.Linear({last}, 6{kind})", "torch.nn.ReLU()", f"torch.nn.Linear(6, {last}{kind})"]
    name = g.attribute("m", f"torch.nn.Sequential({', '.join(layers)})")
    form = g.choice(["{1}", "{0} + {1}", "torch.tanh({1}) + {0}", "torch.sigmoid({0}) * {1}"])
    return Draft(form.replace("{1}", f"self.{name}({{0}})"), [value], uses=(name,))


@op(0.5)
def scalar_product(g: Context) -> Draft:
    """A 1x1 matrix product reshaped to zero dimensions, on which OpenVINO crashes the process."""
    value = g.take(floating, at_least(1), lambda v: v.tensor.numel() > 0)
    matrix = g.choice(["{0}.reshape(1, -1) @ {0}.reshape(-1, 1)", "F.linear({0}.reshape(1, -1), {0}.reshape(1, -1))"])
    form = g.choice(["(M).view(())", "(M).tanh().reshape(())", "(M).T.flatten().reshape([])"])
    return Draft(form.replace("M", matrix), [value])


@op(1.5)
def parameter(g: Context) -> Draft:
    """A parameter along one dimension, which OpenVINO fuses into the preceding kernel where it can."""
    value = g.take(floating, at_least(1), lambda v: v.tensor.numel() > 0)
    along = g.choice([value.dim - 1, g.integer(0, value.dim - 1)])
    shape = ", ".join([str(value.shape[along])] + ["1"] * (value.dim - 1 - along))
    name = g.attribute("p", f"torch.nn.Parameter(torch.randn({shape}{_dtype(value)}))")
    forms = ["{0} * P", "{0} + P", "{0} - P", "torch.relu({0}) * P", "torch.where({0} > 0, {0}, {0} * P)"]
    return Draft(g.choice(forms).replace("P", f"self.{name}"), [value], uses=(name,))


@op(1.0)
def scaled_reduction(g: Context) -> Draft:
    """A reduction followed by arithmetic with a constant or with one number per channel."""
    value = wide_value(g, g.choice([3, 3, 4]))
    dim = g.integer(-value.dim, -1)
    left = [size for at, size in enumerate(value.shape) if at != value.dim + dim]
    along = g.integer(0, len(left) - 1)
    shape = ", ".join([str(left[along])] + ["1"] * (len(left) - 1 - along))
    reduced = g.choice(["{0}.mean(D)", "{0}.sum(D)", "{0}.amax(D)", "{0}.square().sum(D)", "torch.norm({0}, dim=D)"])
    form = g.choice(["R / 3", "R / 3", "R * P", "R + P", "R / 2 - P", "torch.relu(R) * P", "R / (P * P + 1)"])
    names: tuple[str, ...] = ()
    if "P" in form:
        names = (g.attribute("p", f"torch.nn.Parameter(torch.randn({shape}{_dtype(value)}))"),)
        form = form.replace("P", f"self.{names[0]}")
    return Draft(form.replace("R", reduced.replace("D", str(dim))), [value], uses=names)


@op(0.8)
def tied_weight(g: Context) -> Draft:
    value = g.take(floating, at_least(2), lambda v: v.shape[-1] > 0)
    last = value.shape[-1]
    name = g.attribute("p", f"torch.nn.Parameter(torch.randn({g.choice([3, last, last])}, {last}{_dtype(value)}) / 2)")
    there = g.choice(["F.linear({0}, W)", "({0} @ W.t())"])
    back = g.choice([f"F.linear({there}, W.t())", f"{there} @ W"])
    return Draft(back.replace("W", f"self.{name}"), [value], uses=(name,))


@op(0.4)
def tied_convolution(g: Context) -> Draft:
    value = wide_value(g, g.choice([3, 4]))
    channels, rank, size = value.shape[1], value.dim - 2, g.choice([1, 3])
    out = g.choice([2, channels, channels])
    kernel = ", ".join([str(size)] * rank)
    name = g.attribute("p", f"torch.nn.Parameter(torch.randn({out}, {channels}, {kernel}{_dtype(value)}) / 2)")
    there = f"F.conv{rank}d({{0}}, self.{name}, padding={size // 2})"
    return Draft(f"F.conv_transpose{rank}d({there}, self.{name}, padding={size // 2})", [value], uses=(name,))


@op(2.0)
def conv(g: Context) -> Draft:
    value = wide_value(g, g.choice([3, 4, 4]))
    channels, rank = value.shape[1], value.dim - 2
    kind = g.choice(["Conv", "Conv", "Conv", "ConvTranspose"])
    padding = g.choice(["", ", padding=1", ", stride=2", ", dilation=2", ", padding=1, stride=2", ", groups=G"])
    if kind == "Conv" and g.chance(0.15):
        padding = f', padding="same", padding_mode="{g.choice(["zeros", "circular", "reflect", "replicate"])}"'
    out = g.choice([2, 3])
    if "G" in padding:
        padding, out = padding.replace("G", str(channels)), channels
    name = g.attribute("m", f"torch.nn.{kind}{rank}d({channels}, {out}, {g.choice([1, 2, 3])}{padding}{_dtype(value)})")
    return Draft(f"self.{name}({{0}})", [value], uses=(name,))


@op(2.5)
def normalization(g: Context) -> Draft:
    value = g.take(floating, at_least(2), lambda v: v.tensor.numel() > 1 and v.shape[-1] > 1)
    last, channels = value.shape[-1], value.shape[1]
    options = [f"LayerNorm({last}{_dtype(value)})", f"LayerNorm({last}{_dtype(value)})",
               f"RMSNorm({last}, eps=1e-5{_dtype(value)})",
               f"LayerNorm({last}, elementwise_affine=False{_dtype(value)})"]  # fmt: skip
    if value.dim >= 3:
        options += [f"GroupNorm(1, {channels}{_dtype(value)})", f"GroupNorm({channels}, {channels}{_dtype(value)})"]
    if value.dim in (2, 3):
        options += [f"BatchNorm1d({channels}{_dtype(value)})"] * 2
    if value.dim == 3:
        track = ", track_running_stats=True" if g.chance(0.3) else ""
        options += [f"InstanceNorm1d({channels}, affine=True{track}{_dtype(value)})"]
    if value.dim == 4:
        options += [f"BatchNorm2d({channels}{_dtype(value)})"] * 2 + [f"InstanceNorm2d({channels}{_dtype(value)})"]
    name = g.attribute("m", f"torch.nn.{g.choice(options)}")
    return Draft(f"self.{name}({{0}})", [value], uses=(name,))


@op(1.5)
def matmul(g: Context) -> Draft:
    first = g.take(floating, at_least(1))
    inner = first.shape[-1]

    def fits(v: Val) -> bool:
        return v.is_float and v.dtype == first.dtype and v.dim >= 1 and v.shape[-2 if v.dim > 1 else -1] == inner

    return Draft(g.choice(["{0} @ {1}", "torch.matmul({0}, {1})"]), [first, g.take(fits)])


@op(1.0)
def matmul_self(g: Context) -> Draft:
    value = g.take(floating, at_least(2))
    return Draft(g.choice(["{0} @ {0}.transpose(-1, -2)", "{0}.mT @ {0}"]), [value])


@op(0.8)
def einsum(g: Context) -> Draft:
    value = g.take(floating, dims(2, 3))
    code = {
        2: [
            'torch.einsum("ij,ij->i", {0}, {1})',
            'torch.einsum("ij,kj->ik", {0}, {1})',
            "torch.addmm({0}, {0} @ {0}.t(), {1})",
        ],
        3: ['torch.einsum("bij,bkj->bik", {0}, {1})', 'torch.einsum("bij,bij->b", {0}, {1})', "torch.bmm({0}, {1}.mT)"],
    }
    other = g.take(lambda v: v.shape == value.shape and v.dtype == value.dtype)
    return Draft(g.choice(code[value.dim]), [value, other])


@op(0.4)
def outer(g: Context) -> Draft:
    first = g.take(floating, dims(1))
    return Draft(
        g.choice(["torch.outer({0}, {1})", "torch.kron({0}, {1})"]),
        [first, g.take(dims(1), lambda v: v.dtype == first.dtype)],
    )


@op(0.4)
def distances(g: Context) -> Draft:
    value = g.take(dims(2, 3), lambda v: v.dtype is torch.float32)
    return Draft("torch.cdist({0}, {0} + 1)", [value])


@op(1.5)
def pooling(g: Context) -> Draft:
    value = wide_value(g, g.choice([3, 4]))
    rank = value.dim - 2
    code = g.choice([
        f"F.max_pool{rank}d({{0}}, 2)", f"F.avg_pool{rank}d({{0}}, 2, stride=1)",
        f"F.adaptive_avg_pool{rank}d({{0}}, 1)", f"F.adaptive_avg_pool{rank}d({{0}}, 2)",
        f"F.adaptive_max_pool{rank}d({{0}}, 1)", f"F.max_pool{rank}d({{0}}, 3, stride=2, padding=1)",
        f"F.avg_pool{rank}d({{0}}, 3, padding=1, count_include_pad=False)",
        f"F.max_pool{rank}d({{0}}, 2, ceil_mode=True)", f"F.avg_pool{rank}d({{0}}, 2, ceil_mode=True)",
        f"F.lp_pool{rank}d({{0}}.abs() + 0.1, 2, 2)",
    ])  # fmt: skip
    return Draft(code, [value], "move" if "max" in code else "no")


@op(0.4)
def pooling_indices(g: Context) -> Draft:
    value = g.take(dims(4), floating, lambda v: v.exact and len(v.tensor.detach().unique()) == v.tensor.numel())
    return Draft("F.max_pool2d({0}, 2, return_indices=True)", [value], "arith", out=2)


@op(1.2)
def interpolate(g: Context) -> Draft:
    value = wide_value(g, g.choice([3, 4]))
    size = g.choice(["scale_factor=2", "size=3", "size=1", "scale_factor=1.5", "size=7"])
    modes = ["nearest", "nearest", "nearest-exact", "area"]
    modes += ["linear"] if value.dim == 3 else ["bilinear", "bilinear", "bicubic"]
    mode = g.choice(modes)
    extra = ", align_corners=True" if "linear" in mode and g.chance(0.3) else ""
    extra += ", antialias=True" if mode in {"bilinear", "bicubic"} and not extra and g.chance(0.15) else ""
    kind = "move" if mode.startswith("nearest") else "no"
    # In three dimensions torch.compile's decomposition of `nearest` keeps the input's layout; eager does not.
    argument = "{0}.contiguous()" if kind == "move" and value.dim == 3 else "{0}"
    return Draft(f'F.interpolate({argument}, {size}, mode="{mode}"{extra})', [value], kind)


@op(0.5)
def pixel_shuffle(g: Context) -> Draft:
    value = g.take(dims(4), floating)
    return Draft(g.choice(["F.pixel_shuffle({0}.repeat(1, 4, 1, 1), 2)", "F.channel_shuffle({0}.repeat(1, 2, 1, 1), 2)",
                           "F.unfold({0}, 2)"]), [value], "move")  # fmt: skip


@op(0.4)
def grid_sample(g: Context) -> Draft:
    value = g.take(dims(4), lambda v: v.dtype is torch.float32)
    theta = "torch.tensor([[[1.0, 0.1, 0.0], [0.0, 1.0, 0.2]]]).expand({0}.shape[0], 2, 3)"
    grid = f"F.affine_grid({theta}, ({{0}}.shape[0], 1, 2, 3), align_corners=False)"
    return Draft(f"F.grid_sample({{0}}, {grid}, align_corners=False)", [value])


@op(1.2)
def recurrent_cell(g: Context) -> Draft:
    value = g.take(floating, dims(2), lambda v: v.shape[-1] > 0)
    kind = g.choice(["LSTMCell", "GRUCell", "RNNCell"])
    name = g.attribute("m", f"torch.nn.{kind}({value.shape[-1]}, 3{_dtype(value)})")
    if kind == "LSTMCell":
        return Draft(f"self.{name}({{0}})", [value], out=2, uses=(name,))
    return Draft(f"self.{name}({{0}})", [value], uses=(name,))


@op(0.8)
def recurrent(g: Context) -> Draft:
    value = wide_value(g, 3)
    kind = g.choice(["LSTM", "GRU", "RNN"])
    both = ", bidirectional=True" if g.chance(0.3) else ""
    name = g.attribute("m", f"torch.nn.{kind}({value.shape[-1]}, 3, batch_first=True{both}{_dtype(value)})")
    if kind == "LSTM" and g.chance(0.5):
        return Draft(f"self.{name}({{0}})[1]", [value], out=2, uses=(name,))
    return Draft(f"self.{name}({{0}})[0]", [value], uses=(name,))


@op(0.6)
def loss(g: Context) -> Draft:
    value = g.take(floating, dims(2), lambda v: v.shape[1] >= 2)
    target = g.input([size_name(g, value.shape[0])], "int64", "index", 0, 2)
    smooth = g.choice(["", ", label_smoothing=0.1", ', reduction="none"', ", ignore_index=0"])
    return Draft(f"F.cross_entropy({{0}}, {{1}}{smooth})", [value, target])


@op(0.4)
def gate(g: Context) -> Draft:
    first = g.take(floating)
    return Draft("{0} * torch.sigmoid({1}) + {1}", [first, g.take(like(first))])


@op(0.3)
def prelu(g: Context) -> Draft:
    value = g.take(floating, at_least(2))
    name = g.attribute("m", f"torch.nn.PReLU({value.shape[1]}{_dtype(value)})")
    return Draft(f"self.{name}({{0}})", [value], uses=(name,))
