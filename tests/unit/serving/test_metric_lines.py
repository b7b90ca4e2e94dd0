"""Metrics reach TorchServe although other threads print."""

import io
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from serving_worker import WARMUP, save_weights
from ts.metrics.metric_type_enum import MetricTypes

from torchserve_openvino.serving.metrics import WholeLines, keep_metrics_apart
from torchserve_openvino.serving.torchserve.cached_metrics import CachedMetrics


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


def test_a_known_metric_is_written_as_torchserve_writes_it(archive, caplog) -> None:
    made = archive({"handler": {"openvino": {"warmup": WARMUP}}}, weights=save_weights, batch_size=4)
    cache, ours = made.context.metrics, CachedMetrics(made.context.metrics)

    def lines(record: Callable[[], None]) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            record()
        return [re.sub(r"\d{10}", "NOW", each.getMessage()) for each in caplog.records]

    for ids in ({0: "first"}, {0: "second", 1: "third"}, {}, {0: "fourth"}):
        cache.set_request_ids(ids)
        for kind, name, unit in (
            ("gauge", "HandlerTime", "ms"),
            ("counter", "openvino_recompiles_total", "count"),
            # It has a dimension, which is an error that TorchServe logs.
            ("counter", "openvino_tokens_total", "count"),
        ):
            got = lines(lambda kind=kind, name=name, unit=unit: ours.record(kind, name, 1.5, {}, unit))
            expected = lines(
                lambda kind=kind, name=name, unit=unit: cache.add_metric(
                    name, 1.5, unit, dimensions=[], metric_type=MetricTypes(kind)
                )
            )
            assert got == expected and len(got) == 1
            assert all(each in got[0] for each in ids.values()) or "Failed to update" in got[0]
