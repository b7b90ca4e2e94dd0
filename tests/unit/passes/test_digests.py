"""Keys of the cache have a digest of each pass that a graph goes through."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import assert_same
from torchserve_openvino.cache.identity import versions
from torchserve_openvino.cache.identity.versions import ROOMS
from torchserve_openvino.passes import digests
from torchserve_openvino.passes.digests import all_passes, device_passes, file_of, files_behind, graph_passes
from torchserve_openvino.passes.lists import FX_PASSES, OV_PASSES

PACKAGE = Path(versions.__file__).parents[2]
PASSES = PACKAGE / "passes"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the passes, of which digests are computed instead."""
    shutil.copytree(PASSES, tmp_path / "passes", ignore=shutil.ignore_patterns("__pycache__"))
    original = digests.file_of

    def moved(function) -> Path:
        return tmp_path / "passes" / original(function).relative_to(PASSES)

    monkeypatch.setattr(digests, "_ROOM", tmp_path / "passes")
    monkeypatch.setattr(digests, "file_of", moved)
    digests.file_digest.cache_clear()
    yield tmp_path / "passes"
    digests.file_digest.cache_clear()


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    digests.file_digest.cache_clear()


def changed(before: list[str], after: list[str]) -> set[str]:
    assert [each.split()[0] for each in before] == [each.split()[0] for each in after]
    return {old.split()[0] for old, new in zip(before, after, strict=True) if old != new}


def test_a_changed_constant_changes_the_digest_of_its_pass_alone(copy: Path) -> None:
    before = all_passes()
    change(copy / "fx" / "folding.py", "64 * 2**20", "32 * 2**20")
    assert changed(before, all_passes()) == {"fold_casts"}


def test_a_comment_or_docstring_changes_no_digest(copy: Path) -> None:
    before = all_passes()
    change(copy / "fx" / "folding.py", "# A larger constant", "# Any larger constant")
    change(copy / "fx" / "folding.py", '"""Computes in torch what', '"""This computes in torch what')
    assert all_passes() == before


def test_a_helper_changes_the_passes_that_import_it(copy: Path) -> None:
    before = all_passes()
    change(copy / "ov" / "rewiring.py", "def put_behind(", "LIMIT = 1\n\n\ndef put_behind(")
    names = changed(before, all_passes())
    assert {"keep_kernels_apart", "split_gated_products", "keep_digits_of_sums"} <= names
    assert not names & {"pack_weights", "separate_copies", "drop_renames"}


def test_a_missing_file_is_an_error(copy: Path) -> None:
    (copy / "ov" / "rewiring.py").unlink()
    digests.file_digest.cache_clear()
    with pytest.raises(FileNotFoundError, match="rewiring"):
        graph_passes()


def test_a_key_has_the_passes_of_a_device_only_where_they_run() -> None:
    names = {each.name for each in OV_PASSES if each.stage == "device"}
    assert not names & {each.split()[0] for each in graph_passes()}
    assert [each.split()[0] for each in device_passes({"INFERENCE_PRECISION_HINT": "bf16x3"})] == ["multiply_in_bf16x3"]
    one = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": 1}
    assert [each.split()[0] for each in device_passes(one)] == [
        "split_gated_products",
        "keep_masks_finite",
        "round_masks",
        "keep_sensitive_values",
    ]
    assert device_passes({"INFERENCE_PRECISION_HINT": "f32"}) == []


@pytest.mark.parametrize("each", [*FX_PASSES, *OV_PASSES], ids=lambda each: each.name)
def test_a_pass_and_its_condition_are_in_one_file_among_the_passes(each) -> None:
    assert file_of(each.run).is_relative_to(PASSES)
    assert each.when is None or file_of(each.when) == file_of(each.run)


def test_every_file_of_the_passes_is_part_of_some_digest() -> None:
    covered = {file for each in (*FX_PASSES, *OV_PASSES) for file in files_behind(file_of(each.run))}
    covered |= {PACKAGE / room for room in ROOMS}
    # Without code; the order of passes, which keys have; what computes digests.
    free = {PASSES / "lists.py", PASSES / "digests.py"}
    rest = {path for path in PASSES.rglob("*.py") if path.name != "__init__.py"} - covered - free
    # Looked for before a model is compiled, by the backend: it changes properties, not the graph.
    assert not rest, "on what digests do entries depend?"
    for path in PASSES.rglob("__init__.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) == 1, f"{path} must have no code"


def run(model: nn.Module, x: torch.Tensor, folder: Path):
    compiled = tov.compile(model, options={"min_partition_us": 0, "model_caching": True, "cache_dir": str(folder)})
    with torch.no_grad():
        assert_same(compiled.freeze()(x), model(x))
    return compiled.report.cache


def test_a_changed_pass_gives_a_rebuild_and_a_comment_none(copy: Path, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval(), torch.randn(8, 64)
    folder = tmp_path / "cache"
    assert run(model, x, folder).compiles == 1
    change(copy / "fx" / "folding.py", "# A larger constant", "# Any larger constant")
    warm = run(model, x, folder)
    assert (warm.traces, warm.compiles) == (0, 0)
    change(copy / "fx" / "folding.py", "64 * 2**20", "32 * 2**20")
    rebuilt = run(model, x, folder)
    assert (rebuilt.traces, rebuilt.compiles) == (1, 1)
    assert set(rebuilt.nearest) == {"passes"}
    # The properties of this model do not need a pass of the device.
    change(copy / "ov" / "bf16x3.py", "_ROWS = 24", "_ROWS = 25")
    warm = run(model, x, folder)
    assert (warm.traces, warm.compiles) == (0, 0)
