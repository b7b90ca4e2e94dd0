"""The sizes that users have, and the values that blocks of real sizes continue with."""

from __future__ import annotations

from fuzzing.draft import Val
from fuzzing.real_context import RealContext

# Sizes of published models, and both neighbors of those at which kernels change.
HEADS = (32, 40, 48, 63, 64, 64, 64, 72, 80, 96, 112, 127, 128, 128, 128, 128, 129, 144, 160, 192, 192, 255, 256, 256)
HIDDEN = (64, 64, 96, 127, 128, 128, 192, 255, 256, 256, 257, 320, 384, 512, 576, 640, 768, 768, 896, 960, 1000, 1024,
          1152, 1280, 1536, 1600, 2048, 2560, 3072, 3584, 4096)  # fmt: skip
LENGTHS = (1, 2, 4, 7, 8, 12, 15, 16, 17, 31, 32, 33, 33, 49, 50, 63, 64, 65, 77, 100, 127, 128, 129, 144, 196, 197,
           255, 256, 257, 384, 500, 512, 513, 577, 768, 1000, 1024, 1500, 2047, 2048)  # fmt: skip
CHANNELS = (1, 2, 3, 3, 4, 8, 12, 16, 16, 24, 31, 32, 32, 33, 40, 48, 64, 64, 80, 96, 112, 128, 160, 192, 240, 256, 320,
            384, 480, 512, 576, 672, 728, 768, 960, 1024, 1280, 1536, 2048)  # fmt: skip
BATCHES = (1, 1, 1, 1, 2, 2, 2, 3, 4, 4, 5, 7, 8, 12, 16, 24, 31, 32, 33, 48, 64)
SPATIAL = (1, 4, 7, 8, 12, 13, 14, 14, 15, 16, 20, 24, 28, 32, 35, 40, 48, 56, 64, 80, 96, 112, 128, 160, 224)
COUNTS = (
    1_000,
    1_024,
    4_095,
    10_000,
    16_385,
    65_536,
    100_003,
    100_000,
    250_000,
    500_000,
    500_001,
    1_000_000,
    1_000_000,
)
VOCABULARIES = (1_000, 21_128, 30_522, 32_000, 50_257, 65_536, 100_000, 100_277, 128_256, 151_936)
INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "bool")


def tokens(g: RealContext) -> Val:
    """A float value [batch, length, hidden]."""
    known = g.recent(lambda v: v.is_float and v.dim == 3 and v.dtype is g.dtype and v.shape[-1] >= 16)
    return known or g.floats(["B", "S", g.constant(HIDDEN)])


def image(g: RealContext) -> Val:
    """A float value [batch, channels, height, width]."""
    known = g.recent(lambda v: v.is_float and v.dim == 4 and v.dtype is g.dtype and v.shape[-1] == v.shape[-2])
    return known or g.floats(["B", g.constant(CHANNELS), "W", "W"])


def vectors(g: RealContext) -> Val:
    """A float value [batch, hidden]."""
    known = g.recent(lambda v: v.is_float and v.dim == 2 and v.dtype is g.dtype and v.shape[-1] >= 16)
    return known or g.floats(["B", g.constant(HIDDEN)])


def ids(g: RealContext, vocabulary: str) -> Val:
    """Token ids [batch, length] below a constant."""
    return g.input(["B", "S"], "int64", "index", 0, vocabulary)


def family(value: Val) -> str:
    """What `Block.takes` calls a value; empty if blocks do not continue it."""
    if not value.is_float or value.dim not in (2, 3, 4):
        return ""
    if value.dim == 4:
        return "image" if value.shape[-1] == value.shape[-2] else ""
    return {3: "tokens", 2: "vectors"}.get(value.dim, "") if value.shape[-1] >= 16 else ""
