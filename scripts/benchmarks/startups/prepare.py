"""Writes the inputs, eager's answer and the models for `bare`, in a process of its own, before the clock starts.

python -m benchmarks.startups.prepare MODEL FOLDER      (in scripts/)
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.startups.models import ANSWER, BLOB, INPUTS, IR, OV_CONFIG, SOURCES


def prepare(model: str, folder: Path) -> None:
    """Writes `INPUTS`, `ANSWER`, `IR` and `BLOB`."""
    import openvino as ov

    from benchmarks.models import tensors

    source = SOURCES[model]
    torch.manual_seed(0)
    module, kwargs = source.module(source.imports(), source.weights()), source.inputs()
    torch.save(kwargs, folder / INPUTS)
    with torch.inference_mode():
        torch.save([tensor.clone() for tensor in tensors(module(**kwargs))], folder / ANSWER)
    # Exporting first fixes the shapes, as for all other contenders.
    with torch.no_grad():
        converted = ov.convert_model(torch.export.export(module, (), kwargs))
    ov.save_model(converted, folder / IR, compress_to_fp16=False)
    compiled = ov.Core().compile_model(folder / IR, "CPU", OV_CONFIG)
    (folder / BLOB).write_bytes(compiled.export_model().getbuffer())


if __name__ == "__main__":
    prepare(sys.argv[1], Path(sys.argv[2]))
