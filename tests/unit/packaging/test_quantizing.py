"""Quantizing and its proof, on a small network that is trained here on scikit-learn's digits."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import torchserve_openvino as tov
from digits import TRAINED, pictures, trained
from torchserve_openvino.cli.reports.tables import show_proof
from torchserve_openvino.config.sections.quantize import QuantizeSection
from torchserve_openvino.errors import PackagingError
from torchserve_openvino.packaging.quantizing.accuracy import AccuracyComparison
from torchserve_openvino.packaging.quantizing.exporting import exported, quantized
from torchserve_openvino.packaging.quantizing.gate import gated, layers_of, without
from torchserve_openvino.packaging.quantizing.samples import CalibrationSample, Samples, read, shared_items

pytest.importorskip("nncf")


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    return pictures()


@pytest.fixture(scope="module", name="trained")
def trained_network() -> nn.Module:
    return trained()


def samples(digits: tuple[Tensor, Tensor], first: int, count: int, *, labeled: bool = True) -> Samples:
    images, labels = digits
    places = range(first, first + count)
    return Samples(
        tuple(
            CalibrationSample(str(n), ((images[n : n + 1],), {}), int(labels[n]) if labeled else None) for n in places
        ),
        "",
    )


def compiled(model: nn.Module) -> Any:
    return tov.compile(model, dynamic=False)


@pytest.fixture(scope="module")
def int8(trained: nn.Module, digits: tuple[Tensor, Tensor]) -> Any:
    section = QuantizeSection.model_validate({"method": "int8", "calibration": {"data": "x"}})
    calibration = samples(digits, 0, 100)
    return quantized(exported(trained, calibration.items)[0], section, calibration.items)


def test_int8_is_within_a_point_of_f32(trained: nn.Module, digits: tuple[Tensor, Tensor], int8: Any) -> None:
    held_out = samples(digits, TRAINED, 400)
    judge = AccuracyComparison(held_out, "auto", trained)
    kept, proof = gated(int8, judge, 0.01, compiled, mixes=True)
    assert proof.metric == "top1" and proof.f32 > 0.9 and proof.items == 400
    assert kept is int8 and proof.in_f32 == () and len(proof.steps) == 1 and proof.steps[0].drop <= 0.01
    assert {"u8"} == {
        kernel.precision for kernel in served(kept, digits) if kernel.kind in {"Convolution", "FullyConnected"}
    }


def served(model: nn.Module, digits: tuple[Tensor, Tensor]) -> list[Any]:
    found = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(found(digits[0][:2]), model(digits[0][:2]), rtol=0, atol=0.1)
    return found.report.kernels()


@pytest.mark.slow
def test_layers_that_cost_much_stay_in_f32(trained: nn.Module, digits: tuple[Tensor, Tensor]) -> None:
    """One layer sees values in service that calibration did not: dark pictures for bright ones."""
    section = QuantizeSection.model_validate({"method": "int8", "calibration": {"data": "x"}})
    dark = Samples(
        tuple(CalibrationSample(s.name, ((s.inputs[0][0] * 0.02,), {}), s.label) for s in samples(digits, 0, 50).items),
        "",
    )
    model = quantized(exported(trained, dark.items)[0], section, dark.items)
    judge = AccuracyComparison(samples(digits, TRAINED, 200), "auto", trained)
    kept, proof = gated(model, judge, 0.01, compiled, mixes=True)
    assert proof.steps[0].drop > 0.1 and 0 < len(proof.in_f32) <= len(layers_of(model))
    assert layers_of(kept) == [name for name in layers_of(model) if name not in proof.in_f32]
    final = next(step for step in proof.steps if step.in_f32 == len(proof.in_f32))
    assert final.drop <= 0.01
    with pytest.raises(PackagingError, match=r"top1 is 0\.\d+, and 0\.9\d+ in f32.*max_drop is 0\.01"):
        gated(model, judge, 0.01, compiled, mixes=False)


def test_a_layer_in_f32_takes_its_input_as_it_is(int8: Any, digits: tuple[Tensor, Tensor]) -> None:
    names = layers_of(int8)
    assert len(names) == 4
    alone = without(int8, {names[0]})
    assert layers_of(alone) == names[1:] and layers_of(int8) == names
    kinds = [(kernel.kind, kernel.precision) for kernel in served(alone, digits)]
    assert ("Convolution", "f32") in kinds and ("Convolution", "u8") in kinds


def test_without_labels_f32_is_right(trained: nn.Module, digits: tuple[Tensor, Tensor], int8: Any) -> None:
    assert AccuracyComparison(samples(digits, TRAINED, 10, labeled=False), "auto", trained).metric == "cosine"
    judge = AccuracyComparison(samples(digits, TRAINED, 100, labeled=False), "auto", trained, classifies=True)
    assert judge.metric == "agreement" and judge.reference.value == 1.0 and judge.score(int8).value >= 0.98
    cosine = AccuracyComparison(samples(digits, TRAINED, 100, labeled=False), "cosine", trained)
    assert 0.99 < cosine.score(int8).value <= 1.0
    f1 = AccuracyComparison(samples(digits, TRAINED, 100), "f1", trained)
    assert 0.9 < f1.reference.value <= 1.0
    with pytest.raises(PackagingError, match="needs quantize.evaluation.labels"):
        AccuracyComparison(samples(digits, TRAINED, 10, labeled=False), "top1", trained)


def test_batch_sizes_stay_open(trained: nn.Module, digits: tuple[Tensor, Tensor], int8: Any) -> None:
    again = torch.export.export(int8, (digits[0][:2],), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    model = again.module(check_guards=False)
    for count in (1, 3, 8):
        torch.testing.assert_close(model(digits[0][:count]), int8(digits[0][:count]))


def test_what_can_not_be_read_says_why(tmp_path: Path) -> None:
    def no(body: bytes) -> Any:
        raise ValueError("not a picture")

    key = "quantize.calibration"
    with pytest.raises(PackagingError, match="neither a folder of requests nor a .npz file"):
        read(tmp_path / "none", 10, None, no, key)
    with pytest.raises(PackagingError, match="holds no requests"):
        read(tmp_path, 10, None, no, key)
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(PackagingError, match=r"does not answer a\.png: not a picture"):
        read(tmp_path, 10, None, no, key)
    labels = tmp_path / "labels.json"
    labels.write_text('{"b.png": 1}')
    with pytest.raises(PackagingError, match=r"no class for a\.png"):
        read(tmp_path, 10, labels, no, key)
    np.savez(tmp_path / "two.npz", a=np.zeros((3, 2), np.float32), b=np.zeros((4, 2), np.float32))
    with pytest.raises(PackagingError, match="as many items each"):
        read(tmp_path / "two.npz", 10, None, no, key)
    np.savez(tmp_path / "evil.npz", np.array([{"x": 1}], dtype=object))
    with pytest.raises(PackagingError, match="can't be read"):
        read(tmp_path / "evil.npz", 10, None, no, key)
    np.savez(tmp_path / "one.npz", np.arange(6, dtype=np.float32).reshape(3, 2))
    found = read(tmp_path / "one.npz", 2, None, no, key)
    assert len(found) == 2 and found.items[1].inputs[0][0].tolist() == [[2.0, 3.0]] and len(found.digest) == 64


@pytest.mark.parametrize("method", ["int8", "int8_weights", "int4_weights"])
@pytest.mark.slow
def test_a_model_of_tokens_becomes_small(method: str, tmp_path: Path) -> None:
    """Tables of embeddings become small, too, and what `package` stores answers alike for any batch and length."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.first, self.last = nn.Embedding(500, 64), nn.Linear(64, 64), nn.Linear(64, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.last(self.first(self.table(ids)).relu()).mean(1)

    torch.manual_seed(0)
    model = Tokens().eval()
    some = tuple(CalibrationSample("", ((torch.randint(500, (1, 5 + n % 3)),), {})) for n in range(12))
    section = QuantizeSection.model_validate({"method": method, "calibration": {"data": "x"}})
    made = quantized(exported(model, some)[0], section, some)
    stored = exported(made, some)[0]
    torch.export.save(stored, tmp_path / "small.pt2")
    size = sum(p.numel() for p in model.parameters()) * 4
    assert (tmp_path / "small.pt2").stat().st_size < 0.3 * size + 60_000
    again = torch.export.load(tmp_path / "small.pt2").module(check_guards=False)
    served = tov.compile(again, dynamic=True)
    with torch.no_grad():
        for shape in ((1, 6), (3, 5), (4, 9)):
            ids = torch.randint(500, shape)
            expected = made(ids)
            torch.testing.assert_close(again(ids), expected)
            scale = float(expected.abs().max())
            torch.testing.assert_close(served(ids), expected, rtol=0, atol=0.03 * scale)
            torch.testing.assert_close(expected, model(ids), rtol=0, atol=0.15 * scale)
    assert served.report.summary.coverage == 1.0 and not served.report.fallbacks
    if method == "int8":
        names = layers_of(made)
        alone = without(made, {names[0]})
        assert layers_of(alone) == names[1:]
        torch.testing.assert_close(alone(ids), expected, rtol=0, atol=0.05 * scale)


def test_requests_that_were_calibrated_on_are_counted(tmp_path: Path) -> None:
    def items(*rows: int) -> Samples:
        mask = {"mask": torch.ones(1, 3, dtype=torch.bool)}
        made = [CalibrationSample(str(row), ((torch.full((1, 3), float(row)),), mask)) for row in rows]
        return Samples(tuple(made), "")

    assert shared_items(items(1, 2, 3), items(3, 4, 2)) == 2
    assert shared_items(items(1), items(2)) == shared_items(items(), items(1)) == 0


@pytest.mark.parametrize(
    ("shared", "text"),
    [
        (0, "none of which it was"),
        (2, "2 of them that it was"),
        (3, "the very ones that it was"),
        (None, "3 requests:"),
    ],
)
def test_the_table_says_on_which_requests_it_was_measured(shared: int | None, text: str) -> None:
    step = {"in_f32": 0, "added": [], "value": 0.9, "drop": 0.1, "milliseconds": 1.0}
    proof = {"metric": "cosine", "items": 3, "f32": 1.0, "f32_milliseconds": 2.0, "steps": [step], "in_f32": []}
    console = Console(file=io.StringIO(), width=300)
    known = {"shared": shared} if shared is not None else {}
    show_proof({"method": "int8", "evaluation": {**proof, **known}}, console)
    assert text in console.file.getvalue()


class Heads(nn.Module):
    """A model whose outputs are what a test says of its inputs."""

    def __init__(self, outputs: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x)


def test_labels_need_scores_of_classes(digits: tuple[Tensor, Tensor]) -> None:
    for outputs in (lambda x: x.flatten(1).sum(1, keepdim=True), lambda x: x.flatten(1).sum(1)):
        for metric in ("auto", "top1"):
            with pytest.raises(PackagingError, match=r"first output is \[items, classes\]; use cosine"):
                AccuracyComparison(samples(digits, TRAINED, 10), metric, Heads(outputs))


def test_masked_scores_are_compared_where_they_are_numbers(digits: tuple[Tensor, Tensor]) -> None:
    def masked(x: Tensor, sign: float = 1.0, mask: float = -torch.inf) -> Tensor:
        return torch.cat([torch.full((len(x), 1), mask), sign * x.flatten(1)[:, :5] + 1], 1)

    judge = AccuracyComparison(samples(digits, TRAINED, 10, labeled=False), "cosine", Heads(masked))
    assert judge.reference.value == pytest.approx(1.0)
    assert judge.score(Heads(lambda x: masked(x, -1.0))).value < 0.9
    assert judge.score(Heads(lambda x: masked(x, mask=torch.nan))).value == -1.0
    assert judge.score(Heads(lambda x: masked(x, mask=torch.inf))).value == -1.0
    with pytest.raises(PackagingError, match="no finite number"):
        AccuracyComparison(samples(digits, TRAINED, 10, labeled=False), "cosine", Heads(lambda x: x * torch.nan))
