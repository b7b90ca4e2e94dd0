"""Corrections to OpenVINO's support table, each with its reason; extended by what the operator sweep proves."""

ADDED: frozenset[str] = frozenset(
    {
        "aten.celu.default",
        "aten.linear.default",
        "aten.logaddexp.default",
        "aten.mish.default",
        "aten.pixel_shuffle.default",
        "aten.rad2deg.default",
    }
)

BANNED: dict[str, str] = {
    "aten.kthvalue.default": "OpenVINO converts kthvalue to other values than torch",
}
