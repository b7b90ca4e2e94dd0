"""Corrections to OpenVINO's support table, each with its reason: found by running torch's op_db against eager.

scripts/op_conformance.py runs it; tests/unit/ops shows each ban's wrong answer in the raw conversion.
"""

ADDED: frozenset[str] = frozenset(
    {
        "aten.atan.default",
        "aten.celu.default",
        "aten.channel_shuffle.default",
        "aten.col2im.default",
        "aten.dot.default",
        "aten.erfc.default",
        "aten.linear.default",
        "aten.linspace.default",
        "aten.logical_and.default",
        "aten.logical_or.default",
        "aten.logical_xor.default",
        "aten.masked_scatter.default",
        "aten.mish.default",
        "aten.pixel_shuffle.default",
        "aten.pixel_unshuffle.default",
        "aten.rad2deg.default",
        "aten.reflection_pad1d.default",
        "aten.reflection_pad3d.default",
        "aten.repeat_interleave.self_int",
        "aten.scatter_add.default",
        "aten.sort.stable",
    }
)

_SHIFTS = "OpenVINO takes a shift count modulo the width of the type: a shift by 32 changes nothing"
_FAILS = "its conversion in OpenVINO fails"
_SHAPE = "the shape of its result depends on the values of its input"
_INSTEAD = "; a decomposition computes it instead"
_COMPLEX = "OpenVINO does not compute complex numbers"

BANNED: dict[str, str] = {
    "aten.__lshift__.Tensor": _SHIFTS,
    "aten.__rshift__.Tensor": _SHIFTS,
    "aten._cdist_forward.default": "OpenVINO takes every norm for the Euclidean one" + _INSTEAD,
    "aten._native_batch_norm_legit_functional.default": _FAILS + " for statistics that change" + _INSTEAD,
    "aten._safe_softmax.default": "OpenVINO answers NaN for a row of -inf, torch 0" + _INSTEAD,
    "aten.angle.default": "OpenVINO answers 0 for NaN" + _INSTEAD,
    "aten.any.dims": "OpenVINO takes NaN for False, and fails without dimensions" + _INSTEAD,
    "aten.atan2.default": "OpenVINO's is wrong for integers, negative zeros and two infinities" + _INSTEAD,
    "aten.bitwise_left_shift.Tensor": _SHIFTS,
    "aten.bucketize.Tensor": "OpenVINO puts NaN into the first bucket, torch into the last" + _INSTEAD,
    "aten.clamp.Tensor": "OpenVINO rounds the bounds of an integer tensor" + _INSTEAD,
    "aten.erfinv.default": "OpenVINO's loses three digits near 1 and -1",
    "aten.expm1.default": "OpenVINO subtracts 1 from the exponential: small values lose all digits" + _INSTEAD,
    "aten.floor_divide.default": "OpenVINO rounds an integer quotient towards 0" + _INSTEAD,
    "aten.gcd.default": _FAILS + ", or answers 0",
    "aten.index_add.default": _FAILS + _INSTEAD,
    "aten.index_fill.int_Scalar": _FAILS + " for float16 and scalars" + _INSTEAD,
    "aten.kthvalue.default": "OpenVINO converts kthvalue to another shape than torch's",
    "aten.linalg_cross.default": _FAILS + _INSTEAD,
    "aten.log_sigmoid_forward.default": "OpenVINO answers -inf below -88, where torch gives the input back" + _INSTEAD,
    "aten.logaddexp.default": "OpenVINO's loses NaN" + _INSTEAD,
    "aten.logsumexp.default": "OpenVINO's loses NaN, and computes integers in integers" + _INSTEAD,
    "aten.nonzero.default": _SHAPE,
    "aten.repeat_interleave.self_Tensor": _SHAPE,
    "aten.rot90.default": "OpenVINO returns uninitialised memory for a multiple of 4" + _INSTEAD,
    "aten.searchsorted.Tensor": _FAILS + _INSTEAD,
    "aten.view_as_complex.default": _COMPLEX,
    "aten.view_as_real.default": _COMPLEX,
    "aten.where.default": _SHAPE,
}
