"""A worker gives memory back that requests have left behind."""

from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file

from torchserve_openvino.serving.memory import FreedMemory, tidy

_MB = 2**20


def test_freed_memory_goes_back_to_the_operating_system() -> None:
    freed = FreedMemory()
    freed.give_back()
    # Small pieces, which the allocator takes from its heap, with one at the end that keeps the heap from shrinking.
    pieces = [bytearray(50_000) for _ in range(3000)]
    last = pieces[-1]
    full = psutil.Process().memory_info().rss
    del pieces
    freed.give_back()
    assert psutil.Process().memory_info().rss < full - 50 * _MB and len(last) == 50_000


def test_memory_in_use_is_not_looked_for_again_and_again(monkeypatch) -> None:
    trims: list[int] = []
    freed = FreedMemory()
    freed.give_back()
    monkeypatch.setattr("torchserve_openvino.serving.memory._trim", lambda: trims.append(1))
    used = bytearray(b"1") * (200 * _MB)
    for _ in range(5):
        freed.give_back()
    assert len(trims) == 1 and used


def test_mapped_weights_of_the_archive_are_given_back_and_stay_readable(tmp_path: Path) -> None:
    # In a file, as transformers maps the weights of a model that it loads.
    save_file({"weight": torch.rand(16 * _MB)}, tmp_path / "model.safetensors")
    weight = load_file(tmp_path / "model.safetensors")["weight"]
    total = weight.sum()
    full = psutil.Process().memory_info().rss
    tidy(None, tmp_path)
    assert psutil.Process().memory_info().rss < full - 50 * _MB
    assert weight.sum() == total
