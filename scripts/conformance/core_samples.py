"""Handcrafted calls of core overloads that no operator of op_db reaches in eager PyTorch."""

from collections.abc import Callable
from typing import Any

import torch

from conformance.cases import Call


def _calls(*samples: Any) -> Callable[[], list[Call]]:
    """Samples as tuples of arguments; a dict at the end holds keyword arguments."""

    def drawn() -> list[Call]:
        valid = []
        for sample in samples:
            keywords = sample[-1] if sample and isinstance(sample[-1], dict) else {}
            valid.append(Call(sample[:-1] if keywords else sample, keywords))
        return valid

    return drawn


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _integers(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(0))


_STATISTICS = (_values(3), _values(3).abs() + 0.5)

_BITS = ((_integers(3, 4), 6), (_integers(3) > 0, True), (_integers(3).to(torch.int32), -2))

SAMPLES: dict[str, Callable[[], list[Call]]] = {
    "aten._embedding_bag.default": _calls(
        (_values(6, 3), torch.tensor([0, 2, 5, 1]), torch.tensor([0, 2]), False, 0),
        (_values(6, 3), torch.tensor([0, 2, 5, 1]), torch.tensor([0, 3]), False, 1),
    ),
    "aten._fft_c2r.default": _calls((torch.fft.rfft(_values(3, 8)), [1], 2, 8)),
    "aten._native_batch_norm_legit_no_training.default": _calls(
        (_values(2, 3, 4, 4), _values(3), _values(3), *_STATISTICS, 0.1, 1e-5),
        (_values(2, 3), None, None, *_STATISTICS, 0.1, 1e-3),
    ),
    "aten.adaptive_avg_pool1d.default": _calls((_values(2, 3, 7), [3]), (_values(3, 8), [2])),
    "aten.avg_pool1d.default": _calls((_values(2, 3, 7), [3]), (_values(2, 3, 7), [2], [1], [1], False, False)),
    "aten.resize_.default": _calls((_values(3, 4), [2, 6])),
    "aten.atan2.out": _calls((_values(3, 4), _values(4), {"out": torch.empty(3, 4)})),
    "aten.bitwise_and.Scalar": _calls(*_BITS),
    "aten.bitwise_or.Scalar": _calls(*_BITS),
    "aten.bitwise_xor.Scalar": _calls(*_BITS),
    "aten.col2im.default": _calls(
        (_values(1, 12, 12), [4, 5], [2, 2], [1, 1], [0, 0], [1, 1]),
        (_values(2, 8, 25), [4, 4], [2, 2], [1, 1], [1, 1], [1, 1]),
        (_values(2, 8, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
    ),
    "aten.copy.default": _calls((_values(3, 4), _values(4)), (_values(3), _integers(3))),
    "aten.div.Scalar_mode": _calls(
        (_values(3, 4) * 9, 2.5, {"rounding_mode": "floor"}),
        (_values(3, 4) * 9, 2, {"rounding_mode": "trunc"}),
        (_integers(3, 4), 4, {"rounding_mode": "floor"}),
        (_integers(3, 4), -4, {"rounding_mode": "trunc"}),
        (_values(3, 4), 3, {"rounding_mode": None}),
    ),
    "aten.fmod.Scalar": _calls((_values(3, 4) * 9, 2.5), (_values(3, 4) * 9, -2), (_integers(3, 4), 4)),
    "aten.gt.Scalar": _calls((_values(3, 4), 0.5), (_integers(3, 4), 2), (_integers(3, 4), 2.5)),
    "aten.native_dropout.default": _calls((_values(3, 4), 0.5, True)),
    "aten.pow.Scalar": _calls((2.5, _values(3, 4)), (2, _values(3)), (0.5, _integers(3, 4))),
    "aten.randperm.default": _calls((7,)),
    "aten.reflection_pad3d.default": _calls(
        (_values(2, 3, 4, 5, 6), [1, 2, 3, 2, 1, 0]), (_values(3, 4, 5, 6), [0, 0, 1, 1, 2, 2])
    ),
    "aten.replication_pad3d.default": _calls(
        (_values(2, 3, 4, 5, 6), [1, 2, 3, 2, 1, 0]), (_values(3, 4, 5, 6), [7, 0, 1, 1, 2, 2])
    ),
    "aten.scatter.value": _calls(
        (_values(3, 5), 0, torch.tensor([[0, 2, 1, 0, 2]]), 1.5), (_integers(3, 5), 1, torch.tensor([[4], [0], [2]]), 7)
    ),
    "aten.sym_is_contiguous.default": _calls((_values(3, 4),)),
    "aten.sym_numel.default": _calls((_values(3, 4),)),
    "aten.sym_size.int": _calls((_values(3, 4), 1)),
    "aten.sym_storage_offset.default": _calls((_values(3, 4),)),
    "aten.sym_stride.int": _calls((_values(3, 4), 0)),
    "aten.upsample_bilinear2d.vec": _calls(
        (_values(1, 2, 4, 5), [7, 9], True, None), (_values(1, 2, 4, 5), [7, 3], False, None),
        (_values(1, 2, 4, 5), None, False, [1.7, 2.0]),
    ),
    "aten.upsample_nearest2d.vec": _calls(
        (_values(1, 2, 4, 5), [7, 3], None), (_values(1, 2, 4, 5), None, [1.7, 2.0])
    ),
    "aten.var.dim": _calls((_values(3, 4), [1]), (_values(3, 4), [0, 1], False, True), (_values(3, 4), None)),
}  # fmt: skip
