"""GPTQ and AWQ checkpoints of tiny models: quantized and packed number by number, as the formats are defined.

Slow and plain on purpose: what reads them in the package is compared with this.
"""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

# Columns in the order in which AWQ puts them into a word.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Packing:
    """How a checkpoint is packed."""

    method: str = "gptq"
    bits: int = 4
    group_size: int = 32
    symmetric: bool = True
    # GPTQ's second format stores zero points as they are, the first one less 1.
    form: str = "gptq"
    act_order: bool = False
    with_zeros: bool = True
    scales: torch.dtype = torch.float16
    skip: tuple[str, ...] = ("lm_head",)
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        if self.method == "awq":
            own: dict[str, Any] = {"version": "gemm", "zero_point": not self.symmetric}
        else:
            own = {"checkpoint_format": self.form, "sym": self.symmetric, "desc_act": self.act_order}
        return {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size, **own, **self.extra}


@dataclass
class Numbers:
    """A quantized layer: lists by row, then by column or by group; and which group each column is in."""

    values: list[list[int]]
    zeros: list[list[int]]
    scales: torch.Tensor
    groups: list[int]

    def weight(self) -> torch.Tensor:
        """``[out, in]``, float32."""
        scales = self.scales.float().numpy()
        rows = [
            [
                np.float32(value - self.zeros[row][group]) * scales[row, group]
                for value, group in zip(values, self.groups, strict=True)
            ]
            for row, values in enumerate(self.values)
        ]
        return torch.tensor(np.array(rows, dtype=np.float32))


def quantized(weight: torch.Tensor, packing: Packing, seed: int = 0) -> Numbers:
    """Rounds each group of a row to the nearest of ``2**bits`` numbers."""
    rows, columns = weight.shape
    size = columns if packing.group_size == -1 else packing.group_size
    groups = [column // size for column in range(columns)]
    if packing.act_order:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed)).tolist()
        for place, column in enumerate(order):
            groups[column] = place // size
    most, count = 2**packing.bits - 1, max(groups) + 1
    found = Numbers([], [], torch.zeros(rows, count, dtype=packing.scales), groups)
    for row in range(rows):
        numbers = weight[row].tolist()
        zeros = []
        for group in range(count):
            mine = [number for number, owner in zip(numbers, groups, strict=True) if owner == group]
            low, high = min(0.0, *mine), max(0.0, *mine)
            if packing.symmetric:
                high = max(-low, high)
                low = -high
            found.scales[row, group] = (high - low) / most or 1.0
            scale = found.scales[row, group].item()
            zeros.append(2 ** (packing.bits - 1) if packing.symmetric else max(1, min(most, round(-low / scale))))
        found.zeros.append(zeros)
        scales = found.scales[row].tolist()
        found.values.append([
            max(0, min(most, round(number / scales[group]) + zeros[group]))
            for number, group in zip(numbers, groups, strict=True)
        ])  # fmt: skip
    return found


def packed(numbers: Numbers, packing: Packing) -> dict[str, torch.Tensor]:
    """A layer's tensors."""
    rows, columns = len(numbers.values), len(numbers.values[0])
    count, per = len(numbers.zeros[0]), 32 // packing.bits
    zero_words = [[0] * (rows // per) for _ in range(count)]
    if packing.method == "awq":
        weight_words = [[0] * (rows // per) for _ in range(columns)]
        for word in range(rows // per):
            for place, offset in enumerate(AWQ_ORDER):
                row, shift = word * per + offset, packing.bits * place
                for column in range(columns):
                    weight_words[column][word] |= numbers.values[row][column] << shift
                for group in range(count):
                    zero_words[group][word] |= numbers.zeros[row][group] << shift
    else:
        weight_words = [[0] * rows for _ in range(columns // per)]
        for row in range(rows):
            for column in range(columns):
                shift = packing.bits * (column % per)
                weight_words[column // per][row] |= numbers.values[row][column] << shift
            for group in range(count):
                stored = numbers.zeros[row][group] - (packing.form == "gptq")
                assert stored >= 0
                zero_words[group][row // per] |= stored << packing.bits * (row % per)
    found = {"qweight": words(weight_words), "scales": numbers.scales.t().contiguous()}
    if packing.with_zeros:
        found["qzeros"] = words(zero_words)
    if packing.method == "gptq":
        found["g_idx"] = torch.tensor(numbers.groups, dtype=torch.int32)
    return found


def words(numbers: list[list[int]]) -> torch.Tensor:
    """Words of 32 bits, with the last bit as the sign."""
    return torch.tensor([[n - 2**32 if n >= 2**31 else n for n in row] for row in numbers], dtype=torch.int32)


def save_quantized(folder: Path, model: Any, packing: Packing) -> Any:
    """Saves a model as a quantized checkpoint, other tensors in float16; returns what it stands for, in float32."""
    from safetensors.torch import save_file
    from transformers.pytorch_utils import Conv1D

    stands_for = copy.deepcopy(model)
    for weight in stands_for.parameters():
        # Buffers stay: positions are computed in float32 from the configuration.
        weight.data = weight.data.half().float()
    tensors = {name: tensor.half() for name, tensor in model.state_dict().items()}
    for seed, (name, layer) in enumerate(stands_for.named_modules()):
        if isinstance(layer, (nn.Linear, Conv1D)) and name.rpartition(".")[2] not in packing.skip:
            weight = model.get_submodule(name).weight.detach()
            by_column = isinstance(layer, Conv1D)
            numbers = quantized(weight.t() if by_column else weight, packing, seed)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": tensor for part, tensor in packed(numbers, packing).items()}
            layer.weight.data = numbers.weight().t().contiguous() if by_column else numbers.weight()
    shared: dict[int, str] = {}
    for name in list(tensors):
        # Tied weights are stored once.
        source = model.state_dict().get(name)
        if source is not None and shared.setdefault(source.data_ptr(), name) != name:
            del tensors[name]
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    configure(folder, dtype="float16", quantization_config=packing.config())
    return stands_for


def configure(folder: Path, **changes: Any) -> None:
    """Changes config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
