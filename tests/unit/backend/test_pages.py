"""Pages of mapped files are released unless they were written to."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from torchserve_openvino.backend import compile
from torchserve_openvino.backend.runtime.own_weights import give_pages_back

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise")
SIZE = 1 << 20


def resident(path: Path) -> int:
    """Returns the resident bytes of a mapped file."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_clean_pages_go_and_come_back(tmp_path) -> None:
    first, second = (tmp_path / name for name in ("first", "second"))
    for path in (first, second):
        path.write_bytes(bytes(range(256)) * (SIZE // 256))
    kept, other = (np.memmap(path, dtype=np.uint8, mode="c") for path in (first, second))
    assert kept.sum() == other.sum() and resident(first) == SIZE
    assert give_pages_back([first]) == SIZE
    assert resident(first) == 0 and resident(second) == SIZE
    assert kept[:256].tolist() == list(range(256))


def test_what_was_written_stays(tmp_path) -> None:
    path = tmp_path / "written"
    path.write_bytes(bytes(SIZE))
    data = np.memmap(path, dtype=np.uint8, mode="c")
    data[5] = 7
    assert give_pages_back([path]) == 0 and data[5] == 7


def test_a_file_that_is_gone_and_no_file(tmp_path) -> None:
    path = tmp_path / "gone"
    path.write_bytes(bytes(SIZE))
    data = np.memmap(path, dtype=np.uint8, mode="r")
    assert data.sum() == 0
    path.unlink()
    assert give_pages_back([path]) == SIZE and data.sum() == 0
    assert give_pages_back([]) == 0 and give_pages_back([tmp_path / "none"]) == 0


@pytest.mark.parametrize("options", [{}, {"config": {"INFERENCE_NUM_THREADS": 1}}])
def test_a_warm_model_answers_the_same_without_the_pages_of_its_blob(tmp_path, options) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(5000, 64), torch.nn.Linear(64, 512), torch.nn.LayerNorm(512)).eval()
    ids = torch.randint(0, 5000, (4, 9))
    options = {**options, "model_caching": True, "cache_dir": str(tmp_path)}
    for start in range(2):
        compiled = compile(model, options=options).freeze()
        with torch.no_grad():
            answers = [compiled(ids) for _ in range(2)]
            freed = compiled.give_memory_back()
            again = [compiled(ids), compiled(ids.flip(0)).flip(0)]
        assert (freed > 0) is bool(start)
        assert all(torch.equal(answers[0], answer) for answer in answers + again)
