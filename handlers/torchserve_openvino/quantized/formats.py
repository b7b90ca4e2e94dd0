"""The layouts in which GPTQ and AWQ pack a linear layer into words of 32 bits.

GPTQ packs ``per = 32 // bits`` rows of the transposed weight into a word:

    qweight [in / per, out], qzeros [groups, out / per], scales [groups, out], g_idx [in]: the group of each column

AWQ packs as many columns of it, in an order of its own, and has no g_idx:

    qweight [in, out / per], qzeros [groups, out / per], scales [groups, out]
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.quantized.layer import Integers, QuantizedLinear, unpacked
from torchserve_openvino.quantized.scheme import Scheme

# The names of a packed layer's tensors.
WEIGHT, ZEROS, SCALES, GROUPS = PARTS = ("qweight", "qzeros", "scales", "g_idx")
# Which of the eight numbers of a word is the first, the second ... column: AWQ packs columns 0 2 4 6 1 3 5 7.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def read(name: str, parts: Mapping[str, Tensor], scheme: Scheme) -> QuantizedLinear:
    """Unpacks a layer.

    Args:
        name: The layer's, for messages.
        parts: Its tensors by the names of `PARTS`.
        scheme: How they are packed.

    Raises:
        ModelLoadError: A tensor is missing, or its type, size or content does not fit; the message names the layer.
    """
    for part in (WEIGHT, SCALES, *(() if scheme.may_lack_zeros else (ZEROS,))):
        if part not in parts:
            raise ModelLoadError(f"{name}.{part} is missing: the layer has {', '.join(sorted(parts))} only.")
    for part in (WEIGHT, ZEROS):
        if part in parts and parts[part].dtype != torch.int32:
            raise ModelLoadError(f"{name}.{part} holds {parts[part].dtype}, not torch.int32.")
    return (_of_gptq if scheme.method == "gptq" else _of_awq)(name, parts, scheme)


def _of_gptq(name: str, parts: Mapping[str, Tensor], scheme: Scheme) -> QuantizedLinear:
    per = 32 // scheme.bits
    weight = _matrix(name, parts, WEIGHT)
    columns, rows = weight.shape[0] * per, weight.shape[1]
    size = columns if scheme.group_size == -1 else scheme.group_size
    groups = -(-columns // size)
    scales = _scales(name, parts, groups, rows)
    words = _zero_words(name, parts, groups, rows, per)
    owners = np.arange(columns, dtype=np.int64) // size
    if GROUPS in parts:
        owners = _owners(name, parts[GROUPS], columns, groups)
    zeros = _true_zeros(name, words, scheme) if scheme.less_one else unpacked(words, scheme.bits)
    values = unpacked(weight.T, scheme.bits)
    return QuantizedLinear(scheme.bits, values, np.ascontiguousarray(zeros.T), scales, owners)


def _true_zeros(name: str, words: NDArray[np.uint32], scheme: Scheme) -> Integers:
    """Returns the zero points of GPTQ's first format, which stores each as one less.

    A zero point of 0 is stored as -1. Writers disagree on what becomes of its neighbors in the word: GPTQModel borrows
    from the next ones, others keep each apart. Only the last one of a word has no neighbor to hurt.
    """
    highest = 2**scheme.bits - 1
    stored = unpacked(words, scheme.bits).reshape(*words.shape, 32 // scheme.bits)
    if not scheme.by_words and (stored[..., :-1] == highest).any():
        raise ModelLoadError(
            f"{name}.qzeros stores a zero point of 0 as {highest}, which programs that write checkpoint_format: gptq "
            "pack in different ways; save the checkpoint with checkpoint_format: gptq_v2."
        )
    ones = np.uint32((2**32 - 1) // highest)
    return unpacked(words + ones, scheme.bits)


def _of_awq(name: str, parts: Mapping[str, Tensor], scheme: Scheme) -> QuantizedLinear:
    per = 32 // scheme.bits
    weight = _matrix(name, parts, WEIGHT)
    columns, rows = weight.shape[0], weight.shape[1] * per
    size = columns if scheme.group_size == -1 else scheme.group_size
    if columns % size:
        raise ModelLoadError(f"{name} has rows of {columns} weights, which groups of {size} do not divide.")
    groups = columns // size
    scales = _scales(name, parts, groups, rows)
    if ZEROS in parts:
        zeros = _awq_columns(_zero_words(name, parts, groups, rows, per))
    else:
        zeros = np.full((rows, groups), 2 ** (scheme.bits - 1), np.uint8)
    owners = np.arange(columns, dtype=np.int64) // size
    return QuantizedLinear(scheme.bits, _awq_columns(weight), zeros, scales, owners)


def _awq_columns(words: NDArray[np.uint32]) -> Integers:
    """Returns ``[columns, rows]`` for words ``[rows, columns / 8]``."""
    columns = unpacked(words, 4).reshape(*words.shape, 8)[..., _AWQ_PLACES]
    return np.ascontiguousarray(columns.reshape(words.shape[0], -1).T)


def _matrix(name: str, parts: Mapping[str, Tensor], part: str) -> NDArray[np.uint32]:
    matrix = parts[part]
    if matrix.ndim != 2 or not matrix.numel():
        raise ModelLoadError(f"{name}.{part} has shape {list(matrix.shape)}; it must be a matrix.")
    return matrix.numpy().view(np.uint32)


def _zero_words(
    name: str, parts: Mapping[str, Tensor], groups: int, rows: int, per: int
) -> NDArray[np.uint32]:  # fmt: skip
    words = _matrix(name, parts, ZEROS)
    if words.shape[0] != groups or words.shape[1] * per != rows:
        raise ModelLoadError(
            f"{name}.qzeros has shape {list(words.shape)}, not {[groups, rows / per]}: the layer has {rows} rows, and "
            f"{groups} groups of a row."
        )
    return words


def _scales(name: str, parts: Mapping[str, Tensor], groups: int, rows: int) -> NDArray[np.float16 | np.float32]:
    scales = parts[SCALES]
    if scales.dtype not in _FLOATS:
        raise ModelLoadError(f"{name}.scales holds {scales.dtype}, not one of {', '.join(map(str, _FLOATS))}.")
    if list(scales.shape) != [groups, rows]:
        raise ModelLoadError(
            f"{name}.scales has shape {list(scales.shape)}, not {[groups, rows]}: by quantization_config.group_size a "
            f"row has {groups} groups, and by qweight there are {rows} rows."
        )
    if not bool(scales.isfinite().all()):
        raise ModelLoadError(f"{name}.scales holds infinity or NaN.")
    # NumPy has no bfloat16.
    wide = scales.float() if scales.dtype == torch.bfloat16 else scales
    return np.ascontiguousarray(wide.numpy().T)


def _owners(name: str, indices: Tensor, columns: int, groups: int) -> NDArray[np.int64]:
    if indices.dtype not in {torch.int32, torch.int64} or list(indices.shape) != [columns]:
        raise ModelLoadError(
            f"{name}.g_idx has shape {list(indices.shape)} of {indices.dtype}; it must be {columns} integers."
        )
    owners = indices.numpy().astype(np.int64)
    if owners.min() < 0 or owners.max() >= groups:
        raise ModelLoadError(
            f"{name}.g_idx names groups {owners.min()} to {owners.max()}; the layer has 0 to {groups - 1}."
        )
    return owners
