"""TorchScript archives: loaded, compiled, verified and reported as any model, alone and beside a model file."""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from serving_worker import ROWS, WARMUP, close, network
from torch import nn

from torchserve_openvino import OpenVINOHandler
from torchserve_openvino.errors import ModelLoadError, PolicyViolationError, first_line
from torchserve_openvino.serving.loading.torchscript import load_torchscript
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tasks.tensor import TensorHandler


class Network(nn.Module):
    """The network of the other tests, in a file, which scripting needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes two layers."""
        return self.last(self.first(x).relu())


def saved(model: nn.Module, path) -> None:
    torch.jit.script(model.eval()).save(str(path))


def scripted(path) -> None:
    model = Network()
    model.load_state_dict(network().state_dict())
    saved(model, path)


def traced(path) -> None:
    torch.jit.trace(network(), torch.zeros(2, 4)).save(str(path))


@pytest.mark.parametrize("write", [scripted, traced])
@pytest.mark.parametrize("name", ["m.pt", "m.pth"])
def test_a_scripted_model_alone_runs_on_openvino(archive, write, name) -> None:
    made = archive(model_file=None, weights=write, weights_name=name)
    handler = TensorHandler()
    handler.initialize(made.context)
    close(made.handle(handler, ROWS)[0])
    report = worker_of(handler).report
    assert report.summary.coverage == 1.0 and report.summary.fallbacks == 0
    assert report.to_dict()["verify"]["passed"]
    assert isinstance(worker_of(handler).eager_model, torch.jit.ScriptModule)


def test_it_may_be_beside_a_model_file_whose_class_takes_its_weights(archive) -> None:
    made = archive(weights=scripted, weights_name="m.pt")
    handler = TensorHandler()
    handler.initialize(made.context)
    close(made.handle(handler, ROWS)[0])
    assert not isinstance(worker_of(handler).eager_model, torch.jit.ScriptModule)


class Own(OpenVINOHandler):
    """Loads its own file, as many handlers do."""

    def initialize(self, context) -> None:
        """Loads TorchScript by torch itself."""
        folder = context.system_properties["model_dir"]
        self.model = torch.jit.load(f"{folder}/m.pt").eval()
        self.context, self.initialized, self.device = context, True, torch.device("cpu")

    def preprocess(self, data) -> torch.Tensor:
        """Returns the rows of a batch."""
        return torch.tensor([row["body"] for row in data])


def test_a_users_handler_may_load_it_itself(archive) -> None:
    made = archive(model_file=None, weights=scripted, weights_name="m.pt", batch_size=2)
    handler = Own()
    handler.initialize(made.context)
    answers = made.handle(handler, ROWS[0], ROWS[0])
    close(answers[:1])
    assert worker_of(handler).report.summary.coverage == 1.0 and len(answers) == 2


@pytest.mark.parametrize("mode", ["bucket", "exact", "dynamic"])
def test_batches_of_all_sizes(archive, mode: str) -> None:
    config = {"handler": {"openvino": {"warmup": WARMUP, "batching": {"mode": mode}}}}
    made = archive(config, model_file=None, weights=scripted, weights_name="m.pt", batch_size=4)
    handler = TensorHandler()
    handler.initialize(made.context)
    for size in (1, 2, 3, 4):
        for answer in made.handle(handler, *[ROWS] * size):
            close(answer)
    summary = worker_of(handler).report.summary
    # With one symbolic graph, a batch of 1 has a graph of its own.
    assert summary.coverage == 1.0 and summary.recompiles == (mode == "dynamic")


def test_lengths_that_vary_share_a_graph(archive) -> None:
    warmup = {"inputs": [{"shape": ["length"], "dtype": "int64", "low": 0, "high": 20}]}
    section = {"warmup": warmup, "batching": {"dims": {"length": [4, 8, 16]}, "one_graph": True}}
    made = archive(
        {"handler": {"openvino": section}},
        model_file=None,
        weights=lambda path: saved(nn.Sequential(nn.Embedding(20, 3), nn.ReLU()), path),
        weights_name="m.pt",
    )
    handler = TensorHandler()
    handler.initialize(made.context)
    (answer,) = made.handle(handler, [[1, 2, 3, 4, 5]])
    with torch.no_grad():
        expected = worker_of(handler).eager_model(torch.tensor([[1, 2, 3, 4, 5]]))
    torch.testing.assert_close(torch.tensor(answer), expected)
    assert worker_of(handler).report.summary.coverage == 1.0


def test_a_second_worker_starts_from_the_cache(archive, tmp_path) -> None:
    options = {"model_caching": True, "cache_dir": str(tmp_path / "cache")}
    config = {"pt2": {"compile": {"enable": True, "backend": "openvino", "options": options}}}
    for hits in (0, 1):
        made = archive(
            {**config, "handler": {"openvino": {"warmup": WARMUP}}},
            model_file=None,
            weights=scripted,
            weights_name="m.pt",
        )
        handler = TensorHandler()
        handler.initialize(made.context)
        close(made.handle(handler, ROWS)[0])
        cache = worker_of(handler).report.tracker.cache
        assert cache.call_hits == hits and cache.traces == 1 - hits


class Stateful(nn.Module):
    """A module that no graph expresses."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Counts its calls."""
        self.count += 1
        return self.linear(x)


def test_what_cannot_be_converted_runs_in_torchscript_or_is_refused(archive) -> None:
    def load(section: dict) -> TensorHandler:
        made = archive(
            {"handler": {"openvino": {"warmup": WARMUP, **section}}},
            model_file=None,
            weights=lambda path: saved(Stateful(), path),
            weights_name="m.pt",
        )
        handler = TensorHandler()
        handler.initialize(made.context)
        made.handle(handler, ROWS)
        return handler

    report = worker_of(load({})).report
    assert report.summary.coverage == 0.0
    (fallback,) = [each for each in report.fallbacks if each.op == "prim::SetAttr"]
    assert "'count'" in fallback.reason and "test_torchscript.py:" in fallback.where
    with pytest.raises(PolicyViolationError, match=r"prim::SetAttr"):
        load({"fallback": {"allow": [], "on_violation": "refuse"}})
    with pytest.raises(PolicyViolationError, match="coverage"):
        load({"fallback": {"min_coverage": 0.5, "on_violation": "refuse"}})


# --- what is not loaded ---------------------------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None], extra: dict[str, bytes] | None = None) -> Path:
    """Copies an archive; ``change`` gets each member's name and content."""
    other = path.with_name("other.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as target:
        for info in source.infolist():
            content = change(info.filename.partition("/")[2], source.read(info))
            if content is not None:
                target.writestr(info.filename, content)
        for name, content in (extra or {}).items():
            target.writestr(f"{info.filename.partition('/')[0]}/{name}", content)
    return other


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as error:
        load_torchscript(path)
    return str(error.value)


class Saving(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Writes a file."""
        torch.save(x, "/tmp/written-by-torchscript")
        return x


def test_operators_that_open_files_are_refused(tmp_path: Path) -> None:
    saved(Saving(), tmp_path / "m.pt")
    assert "aten::save, which opens files" in refusal(tmp_path / "m.pt")
    for hidden in (b"torch . save(x, ", b"torch. # (\n  save(x, ", b"ops.aten.save(x, "):
        path = rewritten(
            tmp_path / "m.pt", lambda _, content, hidden=hidden: content.replace(b"torch.save(x, ", hidden)
        )
        assert "which opens files" in refusal(path)


def test_tensors_that_claim_more_than_is_stored_are_refused(tmp_path: Path) -> None:
    scripted(tmp_path / "m.pt")
    path = rewritten(tmp_path / "m.pt", lambda name, content: content[:4] if name == "data/0" else content)
    assert "claims" in refusal(path) and "which has 4" in refusal(path)
    gone = rewritten(tmp_path / "m.pt", lambda name, content: None if name == "data/0" else content)
    assert "which has 0" in refusal(gone)


def test_pickles_create_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "created"),)

    scripted(tmp_path / "m.pt")
    path = rewritten(
        tmp_path / "m.pt", lambda name, content: pickle.dumps(Evil(), 2) if name == "data.pkl" else content
    )
    refusal(path)
    assert not (tmp_path / "created").exists()
    unknown = rewritten(tmp_path / "m.pt", lambda _, content: content, {"other.pkl": b"x"})
    assert "'other.pkl'" in refusal(unknown)


def test_archives_that_inflate_are_refused(tmp_path: Path) -> None:
    scripted(tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "m.pt", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/extra/zeros", bytes(2**27))
    assert "inflates" in refusal(tmp_path / "m.pt")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    scripted(tmp_path / "m.pt")
    content = (tmp_path / "m.pt").read_bytes()
    for size in (100, len(content) // 2, len(content) - 30):
        (tmp_path / "cut.pt").write_bytes(content[:size])
        refusal(tmp_path / "cut.pt")
    broken = rewritten(tmp_path / "m.pt", lambda name, content: b"def (" if name.endswith(".py") else content)
    assert "torch.jit.load could not read" in refusal(broken)


def test_an_error_of_torchscript_says_what_happened() -> None:
    script = torch.jit.script(torch.nn.Linear(4, 2))
    with pytest.raises(RuntimeError) as caught:
        script(torch.ones(1, 4, dtype=torch.int64))
    assert "must have the same dtype" in first_line(caught.value)
