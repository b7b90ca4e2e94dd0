"""Blocks of vision and audio models at real sizes: convolutions, norms, attention over channels, windows, pooling."""

from __future__ import annotations

from fuzzing.blocks_dense import activated
from fuzzing.draft import Skip, Val
from fuzzing.real_context import RealContext
from fuzzing.real_inputs import CHANNELS, HIDDEN, image, tokens
from fuzzing.registry import block

# Kernel, stride, padding and dilation as published.
_KERNELS = ((1, 1, 0, 1), (1, 2, 0, 1), (3, 1, 1, 1), (3, 1, 1, 1), (3, 2, 1, 1), (3, 1, 2, 2), (3, 1, 4, 4),
            (5, 1, 2, 1), (5, 2, 2, 1), (7, 2, 3, 1), (7, 1, 3, 1), (11, 4, 2, 1), (2, 2, 0, 1), (4, 4, 0, 1),
            (8, 8, 0, 1), (14, 14, 0, 1), (16, 16, 0, 1), (32, 32, 0, 1))  # fmt: skip
_SEQUENCE_KERNELS = ((3, 1, 1, 1), (3, 2, 1, 1), (10, 5, 0, 1), (2, 2, 0, 1), (5, 1, 2, 1), (7, 1, 3, 1), (4, 1, 3, 1),
                     (1, 1, 0, 1), (3, 1, 4, 4), (128, 1, 64, 1), (31, 1, 15, 1))  # fmt: skip


@block(4.0, "image")
def convolution(g: RealContext) -> None:
    """Convolution, norm, activation and sum, in each of their published combinations."""
    value = image(g)
    result = _convolved(g, value)
    if g.chance(0.7):
        result = _normed(g, result)
    if g.chance(0.7):
        result = activated(g, result)
    if result.shape == value.shape and g.chance(0.7):
        result = g.line("{0} + {1}", result, value)
        if g.chance(0.5):
            activated(g, result)


def _convolved(g: RealContext, value: Val, out: str = "") -> Val:
    channels, width = g.named(value.shape[1]), value.shape[1]
    kernel, stride, padding, dilation = g.choice(_KERNELS)
    options = f"{kernel}, {stride}, {padding}, dilation={dilation}, bias={g.chance(0.5)}{g.typed}"
    kind = g.choice(["usual", "usual", "depthwise", "grouped", "transposed"])
    out = out or g.constant([c for c in CHANNELS if c <= max(64, 2 * width)])
    if kind == "depthwise":
        name = g.layer(f"Conv2d({channels}, {channels} * {g.choice([1, 1, 2])}, {options}, groups={channels})")
    elif kind == "grouped":
        groups = g.choice([2, 4, 8, 32])
        if width % groups:
            raise Skip
        name = g.layer(f"Conv2d({channels}, {channels}, {options}, groups={groups})")
    elif kind == "transposed":
        kernel, stride, padding = g.choice([(2, 2, 0), (4, 2, 1), (3, 2, 1), (4, 4, 0)])
        name = g.layer(f"ConvTranspose2d({channels}, {out}, {kernel}, {stride}, {padding}{g.typed})")
    else:
        name = g.layer(f"Conv2d({channels}, {out}, {options})")
    return g.line(f"self.{name}({{0}})", value, uses=[name])


def _normed(g: RealContext, value: Val) -> Val:
    channels, count = g.named(value.shape[1]), value.shape[1]
    form = g.choice(["batch", "batch", "batch", "batch_new", "group", "group", "instance", "layer"])
    if form == "batch":
        mean, spread = (g.buffer(f"{code}({channels}{g.typed})") for code in ("torch.randn", "0.5 + torch.rand"))
        weight, bias = g.weight(channels), g.weight(channels)
        code = f"F.batch_norm({{0}}, self.{mean}, self.{spread}, self.{weight}, self.{bias}, eps=1e-5)"
        return g.line(code, value, uses=[mean, spread, weight, bias])
    if form == "batch_new":
        name = g.layer(f"BatchNorm2d({channels}{g.typed})")
    elif form == "group":
        groups = g.choice([k for k in (1, 2, 4, 8, 16, 32, count) if count % k == 0])
        name = g.layer(f"GroupNorm({groups}, {channels}{g.typed})")
    elif form == "instance":
        if value.tensor[0, 0].numel() < 2:
            raise Skip
        name = g.layer(f"InstanceNorm2d({channels}, affine={g.chance(0.5)}{g.typed})")
    else:
        weight, bias = g.weight(channels), g.weight(channels)
        code = f"F.layer_norm({{0}}.permute(0, 2, 3, 1), ({channels},), self.{weight}, self.{bias}).permute(0, 3, 1, 2)"
        return g.line(code, value, uses=[weight, bias])
    return g.line(f"self.{name}({{0}})", value, uses=[name])


@block(1.5, "image")
def squeeze_excite(g: RealContext) -> None:
    value = image(g)
    channels, small = g.named(value.shape[1]), g.constant([4, 8, 16, 32, 48])
    pools = ["F.adaptive_avg_pool2d({0}, 1)", "{0}.mean((2, 3), keepdim=True)", "{0}.mean([-2, -1], True)"]
    pooled = g.line(g.choice(pools), value)
    down, up = (g.layer(f"Conv2d({a}, {b}, 1{g.typed})") for a, b in ((channels, small), (small, channels)))
    middle = activated(g, g.line(f"self.{down}({{0}})", pooled, uses=[down]))
    raised = g.line(f"self.{up}({{0}})", middle, uses=[up])
    gate = g.line(g.choice(["torch.sigmoid({0})", "F.hardsigmoid({0})"]), raised)
    g.line(g.choice(["{0} * {1}", "{1} * {0}", "{0} * {1} + {0}"]), value, gate)


@block(1.5, "image")
def channels_last_block(g: RealContext) -> None:
    """ConvNeXt: depthwise 7 x 7, LayerNorm over channels, two linear layers, scale, sum."""
    value = image(g)
    channels = g.named(value.shape[1])
    conv = g.layer(f"Conv2d({channels}, {channels}, 7, padding=3, groups={channels}{g.typed})")
    mixed = g.line(f"self.{conv}({{0}}).permute(0, 2, 3, 1)", value, uses=[conv])
    layer = g.layer(f"LayerNorm({channels}, eps=1e-6{g.typed})")
    normed = g.line(f"self.{layer}({{0}})", mixed, uses=[layer])
    inner = g.product(f"4 * {channels}")
    up, down = (g.layer(f"Linear({a}, {b}{g.typed})") for a, b in ((channels, inner), (inner, channels)))
    middle = activated(g, g.line(f"self.{up}({{0}})", normed, uses=[up]))
    if g.chance(0.3):
        # ConvNeXt V2's global response norm.
        norm = g.line("torch.norm({0}, p=2, dim=(1, 2), keepdim=True)", middle)
        middle = g.line("{0} * ({1} / ({1}.mean(-1, keepdim=True) + 1e-6)) + {0}", middle, norm)
    scale = g.weight(channels, " * 0.1")
    out = g.line(f"(self.{scale} * self.{down}({{0}})).permute(0, 3, 1, 2)", middle, uses=[scale, down])
    g.line("{0} + {1}", value, out)


@block(2.0, "image")
def windows(g: RealContext) -> None:
    """Swin: a roll, windows, attention with position bias in each, and back."""
    value = image(g)
    size = g.choice([4, 7, 8, 12])
    if value.shape[-1] % size:
        raise Skip
    rows = g.line("{0}.permute(0, 2, 3, 1)", value, exact="move")
    shift = g.choice([0, size // 2])
    if shift:
        rows = g.line(f"torch.roll({{0}}, (-{shift}, -{shift}), (1, 2))", rows, exact="move")
    view = "view" if rows.tensor.is_contiguous() else "reshape"
    cut = f"{{0}}.{view}({{0}}.shape[0], {{0}}.shape[1] // {size}, {size}, {{0}}.shape[2] // {size}, {size}, -1)"
    split = g.line(f"{cut}.permute(0, 1, 3, 2, 4, 5).reshape(-1, {size * size}, {{0}}.shape[3])", rows, exact="move")
    channels = value.shape[1]
    if channels % 4 == 0 and g.chance(0.8):
        heads = g.choice([1, 2, 4])
        split = _window_attention(g, split, heads, size)
    back = (f"{{0}}.view({{1}}.shape[0], {{1}}.shape[1] // {size}, {{1}}.shape[2] // {size}, {size}, {size}, -1)"
            ".permute(0, 1, 3, 2, 4, 5)")  # fmt: skip
    joined = g.line(f"{back}.reshape({{1}}.shape[0], {{1}}.shape[1], {{1}}.shape[2], -1)", split, rows, exact="move")
    if shift:
        joined = g.line(f"torch.roll({{0}}, shifts=({shift}, {shift}), dims=(1, 2))", joined, exact="move")
    g.line("{0}.permute(0, 3, 1, 2) + {1}", joined, value)


def _window_attention(g: RealContext, split: Val, heads: int, size: int) -> Val:
    channels = g.named(split.shape[-1])
    name = g.layer(f"Linear({channels}, 3 * {channels}{g.typed})")
    parts = f"self.{name}({{0}}).view({{0}}.shape[0], {{0}}.shape[1], 3, {heads}, -1).permute(2, 0, 3, 1, 4).unbind(0)"
    query, key, value = g.lines_of(parts, 3, split, uses=[name])
    bias = g.weight(f"{heads}, {size * size}, {size * size}")
    if g.chance(0.5):
        code = f"{{0}} @ {{1}}.transpose(-2, -1) * {{0}}.shape[-1] ** -0.5 + self.{bias}"
        scores = g.line(code, query, key, uses=[bias])
        out = g.line("torch.softmax({0}, -1) @ {1}", scores, value)
    else:
        code = f"F.scaled_dot_product_attention({{0}}, {{1}}, {{2}}, attn_mask=self.{bias}.unsqueeze(0))"
        out = g.line(code, query, key, value, uses=[bias])
    return g.line("{0}.transpose(1, 2).reshape({1}.shape)", out, split, exact="move")


@block(2.0, "image")
def pooling(g: RealContext) -> None:
    value = (
        g.floats(["B", g.constant(CHANNELS), "W", "W"], ["infinite", "infinite", "distinct"])
        if g.chance(0.5)
        else image(g)
    )
    g.infinite = True
    code = g.choice([
        "F.max_pool2d({0}, 2)", "F.max_pool2d({0}, 3, 2, 1)", "F.max_pool2d({0}, 2, ceil_mode=True)",
        "F.max_pool2d({0}, 5, 1, 2)", "F.adaptive_max_pool2d({0}, 1)", "F.adaptive_max_pool2d({0}, 7)",
        "F.max_pool2d({0}, 3, 1, 1, dilation=2)",
        "F.avg_pool2d({0}, 2)", "F.avg_pool2d({0}, 3, 2, 1)", "F.avg_pool2d({0}, 3, 2, 1, count_include_pad=False)",
        "F.avg_pool2d({0}, 3, 1, 1) - {0}", "F.adaptive_avg_pool2d({0}, 1)", "F.adaptive_avg_pool2d({0}, 7)",
        "F.adaptive_avg_pool2d({0}, (3, 2))", "{0}.amax((2, 3))", "F.lp_pool2d({0}.abs() + 0.1, 2, 2)",
    ])  # fmt: skip
    if "max" not in code and not value.tensor.isfinite().all():
        raise Skip
    g.line(code, value, exact="move" if "max" in code else "no")


@block(1.0, "tokens")
def pooling_of_sequences(g: RealContext) -> None:
    """Text CNNs: convolutions over masked tokens, the largest value over time."""
    value = g.floats(["B", g.constant([1, 3, 16, 100, 128, 300]), "S"], ["infinite", "infinite", "normal"])
    g.infinite = True
    code = g.choice(["F.max_pool1d({0}, 2)", "F.max_pool1d({0}, 3, 2, 1)", "F.adaptive_max_pool1d({0}, 1)",
                     "F.adaptive_max_pool1d({0}, 4)", "{0}.amax(-1)", "torch.max({0}, dim=2)[0]",
                     "F.max_pool1d({0}, {0}.shape[2])"])  # fmt: skip
    result = g.line(code, value, exact="move")
    if not result.tensor.isfinite().all() and g.chance(0.6):
        g.line('{0}.masked_fill({0} == float("-inf"), 0)', result, exact="arith")


@block(1.5, "tokens")
def sequence_convolution(g: RealContext) -> None:
    """Audio and state space models: one-dimensional convolutions with published kernels."""
    value = g.line("{0}.transpose(1, 2)", tokens(g), exact="move")
    channels = g.named(value.shape[1])
    kernel, stride, padding, dilation = g.choice(_SEQUENCE_KERNELS)
    groups = g.choice(["1", "1", channels, channels, "2", "16"])
    if value.shape[1] % g.number(groups):
        raise Skip
    out = channels if groups != "1" else g.constant([c for c in HIDDEN if c <= 512])
    options = f"padding={padding}, dilation={dilation}, groups={groups}, bias={g.chance(0.5)}{g.typed}"
    name = g.layer(f"Conv1d({channels}, {out}, {kernel}, {stride}, {options})")
    result = g.line(f"self.{name}({{0}})", value, uses=[name])
    if kernel == 4:
        result = g.line("{0}[..., :{1}.shape[-1]]", result, value, exact="move")
    if g.chance(0.4):
        norm = g.choice([f"GroupNorm({out}, {out}{g.typed})", f"BatchNorm1d({out}{g.typed})", f"InstanceNorm1d({out})"])
        layer = g.layer(norm)
        result = g.line(f"self.{layer}({{0}})", result, uses=[layer])
    g.line("{0}.transpose(1, 2)", activated(g, result), exact="move")


@block(1.5, "image")
def resized(g: RealContext) -> None:
    value = image(g)
    mode = g.choice(["nearest", "nearest-exact", "bilinear", "bilinear", "bicubic", "area"])
    size = g.choice(["scale_factor=2", "scale_factor=0.5", "size=(7, 7)", "size=(32, 24)", "size=(64, 64)",
                     "size=(14, 14)", "scale_factor=1.5", "size=(33, 33)"])  # fmt: skip
    extra = f", align_corners={g.chance(0.5)}" if mode.startswith("bi") else ""
    extra += ", antialias=True" if mode.startswith("bi") and g.chance(0.2) else ""
    g.line(f'F.interpolate({{0}}, {size}, mode="{mode}"{extra})', value, exact="move" if "nearest" in mode else "no")


@block(1.0, "image")
def rearranged(g: RealContext) -> None:
    value = image(g)
    code = g.choice([
        "F.pixel_unshuffle({0}, 2)", "F.pixel_shuffle({0}, 2)", "F.channel_shuffle({0}, 2)", "F.pad({0}, (1, 1, 1, 1))",
        'F.pad({0}, (3, 3, 3, 3), mode="reflect")', "{0}[:, :, 1::2, 0::2]", "torch.cat([{0}, {0}.flip(-1)], 1)",
        "torch.cat([{0}[..., ::2, ::2], {0}[..., 1::2, ::2], {0}[..., ::2, 1::2], {0}[..., 1::2, 1::2]], 1)",
        "{0}.flip(1)", "F.unfold({0}, 3, padding=1)", 'F.pad({0}, (1, 2, 0, 1), mode="replicate")',
    ])  # fmt: skip
    g.line(code, value, exact="move")


@block(2.0, "image")
def patches(g: RealContext) -> None:
    """Tokens of an image: a strided convolution, a class token, positions."""
    value = image(g)
    size = g.choice([s for s in (1, 2, 4, 8, 14, 16, 32) if s <= value.shape[-1]] or [1])
    hidden = g.constant([s for s in HIDDEN if s <= 1024])
    name = g.layer(f"Conv2d({g.named(value.shape[1])}, {hidden}, {size}, {size}{g.typed})")
    rows = g.line(f"self.{name}({{0}}).flatten(2).transpose(1, 2)", value, uses=[name])
    if g.chance(0.5):
        first = g.weight(f"1, 1, {hidden}")
        g.line(f"torch.cat([self.{first}.expand({{0}}.shape[0], -1, -1), {{0}}], 1)", rows, exact="move", uses=[first])


@block(1.0, "image")
def features(g: RealContext) -> None:
    """The head of a classifier."""
    value = image(g)
    pools = ["{0}.mean((2, 3))", "F.adaptive_avg_pool2d({0}, 1).flatten(1)", "{0}.flatten(2).mean(-1)"]
    pooled = g.line(g.choice(pools), value)
    name = g.layer(f"Linear({g.named(value.shape[1])}, {g.constant([2, 10, 91, 1000, 21843])}{g.typed})")
    g.line(f"torch.softmax(self.{name}({{0}}), -1)", pooled, uses=[name])


@block(0.7, "image")
def sampled(g: RealContext) -> None:
    value = image(g)
    if value.dtype.itemsize != 4:
        raise Skip
    theta = "torch.tensor([[[0.9, 0.1, 0.0], [-0.1, 0.8, 0.2]]]).expand({0}.shape[0], 2, 3)"
    grid = g.line(f"F.affine_grid({theta}, {{0}}.shape, align_corners=False)", value)
    g.line("F.grid_sample({0}, {1}, align_corners=False)", value, grid)
