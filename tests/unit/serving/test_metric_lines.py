"""Metrics reach TorchServe although other threads print."""

import io
import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from torchserve_openvino.serving.metrics import WholeLines, keep_metrics_apart


@pytest.fixture
def often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Slow(io.StringIO):
    """Lets other threads run between two writes, as a pipe that is full does."""

    def write(self, text: str) -> int:
        threading.Event().wait(1e-5)
        return super().write(text)


@pytest.mark.usefixtures("often")
def test_lines_of_threads_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Slow()
    monkeypatch.setattr(sys, "stdout", target)
    # As in TorchServe's worker: the log goes to the output that was there first.
    logger = logging.getLogger("metric lines")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(sys.stdout))
    keep_metrics_apart()
    keep_metrics_apart()
    assert isinstance(sys.stdout, WholeLines)

    def printing() -> None:
        for _ in range(200):
            print("self._entry_point=<bound method>")

    threads = [threading.Thread(target=printing) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(200):
        logger.info("[METRICS]openvino_tokens_total.count:%d|#direction:prompt", number)
    for thread in threads:
        thread.join()
    lines = target.getvalue().splitlines()
    assert len(lines) == 600
    assert [line for line in lines if "METRICS" in line] == [
        f"[METRICS]openvino_tokens_total.count:{number}|#direction:prompt" for number in range(200)
    ]


def test_a_line_that_is_not_complete_comes_with_flush() -> None:
    target = io.StringIO()
    output = WholeLines(target)
    print("a\nb", end="", file=output)
    assert target.getvalue() == "a\n"
    print("c", end="", file=output, flush=True)
    assert target.getvalue() == "a\nbc"
    print(file=output)
    assert target.getvalue() == "a\nbc\n"
    assert not output.isatty() and output.writable()
