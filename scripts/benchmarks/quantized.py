"""Times int8 against f32, this package and raw OpenVINO, and int4 layers against eager PyTorch.

    python scripts/benchmarks/quantized.py
    python scripts/benchmarks/quantized.py --models resnet50 --turns 50 --json quantized.json

NNCF quantizes each model once, as `package --quantize` does; raw OpenVINO runs that same model, and what NNCF makes of
the model in f32 that OpenVINO converted. All contenders run interleaved in one process; compare the ratios. The
difference is that from the quantized model in eager PyTorch, relative to its largest value, over several inputs. Needs
the extras `examples`, `hf` and `quantize`. For int8, a CPU with VNNI or AMX.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torchserve_openvino as tov
from benchmarks import output
from benchmarks.harness import Call, enough_repeats, interleave
from benchmarks.models import MODELS, BenchModel, tensors
from torchserve_openvino.config.sections.quantize import QuantizeSection
from torchserve_openvino.errors import class_and_line
from torchserve_openvino.packaging.quantizing.exporting import exported, quantized
from torchserve_openvino.packaging.quantizing.samples import CalibrationSample

INT4 = "int4-layers"
EAGER, EAGER_MADE, OURS_F32, OURS = "eager, f32", "eager, quantized", "this package, f32", "this package, quantized"
RAW_F32, RAW, RAW_OWN = "raw OpenVINO, f32", "raw OpenVINO, same model", "raw OpenVINO, own int8"


def calibration(model: BenchModel, count: int = 32) -> list[CalibrationSample]:
    """Inputs like the model's own: photos for pictures, random tokens for texts."""
    if model.name == "MiniLM-L6":
        texts = [torch.randint(1000, 20000, (1, 128)) for _ in range(count)]
        return [
            CalibrationSample("", ((), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})) for ids in texts
        ]
    (name,) = model.kwargs
    if model.name == "EfficientNet-Lite0":
        from benchmarks.servers import photos
        from torchserve_openvino.config.sections.task_sections import ImageSection
        from torchserve_openvino.tasks.picture_transforms import to_tensor

        tensors = [to_tensor(photo.data, ImageSection())[None] for photo in photos.load()]
        return [CalibrationSample("", ((), {name: tensor})) for tensor in tensors]
    return [CalibrationSample("", ((), {name: torch.randn_like(model.kwargs[name])})) for _ in range(count)]


def layers() -> BenchModel:
    """Four linear layers of 1024 x 1024."""
    parts = [part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.ReLU())]
    return BenchModel("4 x 1024 x 1024", nn.Sequential(*parts).eval(), {"input": torch.randn(1, 1024)})


def ours(module: nn.Module, model: BenchModel) -> tuple[Call, Any]:
    compiled = tov.compile(module, dynamic=False).freeze()
    with torch.inference_mode():
        compiled(**model.kwargs)
        compiled(**model.kwargs)
    return lambda: compiled(**model.kwargs), compiled


def raw(converted: Any, model: BenchModel) -> tuple[Call, Any]:
    """One static shape, without copies of inputs or outputs."""
    import openvino as ov

    converted.reshape(
        {port: list(value.shape) for port, value in zip(converted.inputs, model.kwargs.values(), strict=True)}
    )
    compiled = ov.Core().compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()

    def call(kwargs: dict[str, torch.Tensor] = model.kwargs) -> list[torch.Tensor]:
        result = request.infer([kwarg.numpy() for kwarg in kwargs.values()], share_inputs=True, share_outputs=True)
        return [torch.from_numpy(result[port]) for port in compiled.outputs]

    return call, call


def convert(module: nn.Module, model: BenchModel) -> Any:
    import openvino as ov

    return ov.convert_model(torch.export.export(copy.deepcopy(module), (), model.kwargs))


def difference(call: Callable[..., Any], expected: Callable[..., Any], samples: Sequence[CalibrationSample]) -> float:
    """The largest one, relative to the largest value of each answer."""
    worst = 0.0
    for sample in samples:
        kwargs = sample.inputs[1]
        pairs = zip(tensors(call(**kwargs)), tensors(expected(**kwargs)), strict=True)
        worst = max(worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    return worst


def measure(name: str, turns: int) -> dict[str, Any]:
    """Returns medians in milliseconds, ratios, differences and precisions of one model."""
    import nncf
    import openvino as ov

    torch._dynamo.reset()
    model = layers() if name == INT4 else MODELS[name]()
    samples = calibration(model)
    method = "int4_weights" if name == INT4 else "int8"
    section = QuantizeSection.model_validate({"method": method, "calibration": {"data": "-"}})
    converted = quantized(exported(model.module, samples)[0], section, samples)
    checked = samples[:8]
    contenders: dict[str, tuple[Call, Any]] = {
        EAGER: (lambda: model.module(**model.kwargs), None),
        EAGER_MADE: (lambda: converted(**model.kwargs), None),
        OURS_F32: ours(model.module, model),
        OURS: ours(converted, model),
    }
    if name != INT4:
        contenders[RAW_F32] = raw(convert(model.module, model), model)
        data = nncf.Dataset([[tensor.numpy() for tensor in sample.inputs[1].values()] for sample in samples])
        kind = nncf.ModelType.TRANSFORMER if name == "minilm" else None
        own = nncf.quantize(convert(model.module, model), data, model_type=kind, subset_size=len(samples))
        contenders[RAW_OWN] = raw(own, model)
    try:
        contenders[RAW] = raw(convert(converted, model), model)
    except (RuntimeError, ov.frontend.OpConversionFailure) as error:
        output.progress.print(f"{RAW}: {class_and_line(error)}", markup=False)
    calls = {key: call for key, (call, _) in contenders.items()}
    with torch.inference_mode():
        apart = {OURS: difference(contenders[OURS][1], converted, checked)}
        if RAW in contenders:
            apart[RAW] = difference(lambda **kwargs: contenders[RAW][1](kwargs), converted, checked)
        interleave(calls, 3)
        times = interleave(calls, turns, repeats=enough_repeats(calls))
    report = contenders[OURS][1].report
    return {
        "model": model.name,
        "milliseconds": {key: times.median(key) for key in calls},
        "times_faster": {key: times.ratio(EAGER, key) for key in calls},
        "ours_int8_over_f32": times.ratio(OURS_F32, OURS),
        "ours_over_raw": {key: times.ratio(OURS, key) for key in (RAW, RAW_OWN) if key in calls},
        "difference": apart,
        "precisions": report.precisions(),
        "coverage": report.summary.coverage,
    }


def row(one: dict[str, Any], key: str) -> tuple[str, ...]:
    """One contender's cells."""
    times, apart, over = (one[name].get(key) for name in ("times_faster", "difference", "ours_over_raw"))
    return (
        key,
        f"{one['milliseconds'][key]:.3f}",
        output.number(times),
        output.number(apart, ".1e"),
        output.number(over),
    )


def main(
    models: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join((*MODELS, INT4))}")] = ",".join(
        (*MODELS, INT4)
    ),
    turns: Annotated[int, typer.Option(help="Measured turns.", min=3)] = 30,
    threads: Annotated[int, typer.Option(help="Of eager PyTorch; OpenVINO takes all cores.", min=1)] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Times quantized models against f32 and raw OpenVINO, interleaved."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    results = []
    for name in output.chosen(models, (*MODELS, INT4), "--models"):
        with output.progress.status(f"{name}: quantizing, compiling, timing"):
            results.append(measure(name, turns))
        one = results[-1]
        cells = [row(one, key) for key in one["milliseconds"]]
        columns = ("contender", "ms", "x eager", "difference", "ours / it")
        shares = ", ".join(f"{key} {share:.0%}" for key, share in one["precisions"].items())
        faster = f"{one['ours_int8_over_f32']:.2f} x this package's f32"
        title = f"{one['model']}: {faster}; {shares}; coverage {one['coverage']:.0%}"
        output.results().print(output.table(title, columns, cells))
    output.write_json(json_path, {"models": results})


if __name__ == "__main__":
    typer.run(main)
