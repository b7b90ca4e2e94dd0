"""A faulty user mapping: it ignores hardtanh's bounds."""

import openvino.opset13 as ops

import torchserve_openvino as tov


@tov.register_op("aten::hardtanh")
def hardtanh(x, min_val=-1.0, max_val=1.0):
    return ops.clamp(x, -1.0, 1.0)
