"""Quantizes the model of an unpacked archive: ``python -m ... ARCHIVE BESIDE OUT [MADE]``, in a process of its own.

The archive's handler runs in eager PyTorch, so that calibration sees what requests make of its model.
"""

import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.fx import GraphModule

import torchserve_openvino as tov
from torchserve_openvino.config import load_serving_config
from torchserve_openvino.config.sections.quantize import QuantizeSection
from torchserve_openvino.config.yaml_source import read_yaml
from torchserve_openvino.errors import ModelLoadError, PackagingError
from torchserve_openvino.packaging.quantizing.accuracy import AccuracyComparison
from torchserve_openvino.packaging.quantizing.exporting import exported, quantized
from torchserve_openvino.packaging.quantizing.gate import gated
from torchserve_openvino.packaging.quantizing.samples import Caller, Samples, distinct_shapes, read, shared_items
from torchserve_openvino.report.quiet import quiet_libraries
from torchserve_openvino.serving.loading.archive_manifest import QUANTIZED_MODEL, model_of
from torchserve_openvino.serving.loading.exported_program import load_program
from torchserve_openvino.serving.torchserve.archive_loader import load_without_server
from torchserve_openvino.serving.torchserve.base import worker_of

# Prefixes of the line with the result, of the one with an error, and of those that tell how it goes on.
RESULT, ERROR = "torchserve-openvino-quantized: ", "torchserve-openvino-refused: "
STEP = "torchserve-openvino-step: "
logger = logging.getLogger("torchserve_openvino.packaging.quantizing.quantizing_worker")


def main(archive: Path, beside: Path, out: Path, built: Path | None = None) -> None:
    """Quantizes, and writes the model.

    Args:
        archive: The unpacked archive.
        beside: Folder to which paths in its YAML are relative.
        out: Folder for `QUANTIZED_MODEL`.
        made: An exported program of the quantized model, which is then only compared.

    Raises:
        PackagingError: The model can't be quantized, or loses too much.
    """
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as scratch:
        eager_folder = Path(scratch) / "eager"
        shutil.copytree(archive, eager_folder)
        section = _without_compilation(eager_folder)
        handler = load_without_server(eager_folder)
        worker = worker_of(handler)
        model = getattr(worker, "eager_model", None)
        if not isinstance(model, nn.Module):
            raise PackagingError("--quantize needs a handler of this package whose self.model is a torch.nn.Module.")
        facts = _quantize(worker, model, section, beside, out, built)
    print(RESULT + json.dumps(facts), flush=True)


def _without_compilation(folder: Path) -> QuantizeSection:
    """Lets the archive's handler answer in eager PyTorch; returns how its model is to be quantized."""
    path = folder / str(model_of(folder)["configFile"])
    section = load_serving_config(path, check_device=False).openvino.quantize
    document = dict(read_yaml(path).data)
    document["pt2"] = {"compile": {"enable": False}}
    # A worker refuses an archive that should be quantized, and is not.
    del document["handler"]["openvino"]["quantize"]
    # These are no requests of clients.
    document["handler"]["openvino"].pop("record", None)
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return section


def _quantize(
    served: Any, model: nn.Module, section: QuantizeSection, beside: Path, out: Path, inputs: Path | None
) -> dict[str, Any]:
    if getattr(served.handler, "needs_f32", False) and not section.keep_f32:
        raise PackagingError(
            "only one half of this model is quantized, and the other needs its weights: set "
            "handler.openvino.quantize.keep_f32: true."
        )
    call = Caller(model, served.run_sample)

    def samples(data: str | None, most: int, labels: str | None, key: str) -> Samples | None:
        if data is None:
            return None
        return read(beside / data, most, beside / labels if labels else None, call, f"quantize.{key}")

    calibration = samples(section.calibration.data, section.calibration.samples, None, "calibration")
    settings = section.evaluation
    evaluation = samples(settings.data or section.calibration.data, settings.samples, settings.labels, "evaluation")
    assert evaluation is not None
    used = calibration or evaluation
    if inputs is None:
        logger.info("exporting, and quantizing by %s with %d requests", section.method, len(used))
        model_ = quantized(exported(model, used.items)[0], section, used.items)
    else:
        model_ = _read(inputs)
    several = sum(1 for _ in distinct_shapes(evaluation.items)) > 1

    def compiled(model: nn.Module) -> tov.CompiledModule:
        # As many graphs as there are lengths would take long.
        return tov.compile(model, dynamic=several)

    logger.info("comparing %d requests with f32", len(evaluation))
    judge = AccuracyComparison(evaluation, settings.metric, compiled(model), classifies=_classifies(served))
    quantized_model, proof = gated(model_, judge, section.max_drop, compiled, mixes=section.method == "int8")
    if inputs is not None and quantized_model is model_:
        shutil.copyfile(inputs, out / QUANTIZED_MODEL)
    else:
        torch.export.save(exported(quantized_model, used.items)[0], out / QUANTIZED_MODEL)
    calibrated = section.method != "int8_weights" and inputs is None
    # Requests by which the model was quantized: what is measured on them alone flatters it.
    shared = shared_items(evaluation, used) if calibrated else 0
    return {
        "method": section.method,
        "keeps_f32": section.keep_f32,
        "calibration": {"items": len(used), "digest": used.digest} if calibrated else None,
        "from": inputs.name if inputs is not None else None,
        "evaluation": {"digest": evaluation.digest, "unseen": not shared, "shared": shared, **proof.to_dict()},
    }


def _read(path: Path) -> GraphModule:
    try:
        return load_program(path).module(check_guards=False)
    except ModelLoadError as error:
        raise PackagingError(f"--from: {error}") from error


def _classifies(served: Any) -> bool:
    return "classifier" in type(served.handler).__module__ or (served.model_dir / "index_to_name.json").is_file()


if __name__ == "__main__":
    quiet_libraries()
    shown = logging.StreamHandler(sys.stdout)
    shown.setFormatter(logging.Formatter(f"{STEP}%(message)s"))
    steps = logging.getLogger("torchserve_openvino.packaging.quantizing")
    steps.addHandler(shown)
    steps.setLevel(logging.INFO)
    # Nobody reads the metrics of these requests.
    logging.getLogger("MODEL_METRICS").setLevel(logging.WARNING)
    logging.getLogger("ts.metrics").setLevel(logging.WARNING)
    try:
        main(*map(Path, sys.argv[1:]))
    except PackagingError as error:
        print(ERROR + json.dumps(str(error)), flush=True)
        raise SystemExit(1) from None
