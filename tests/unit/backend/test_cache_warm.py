"""A second process starts without tracing or compiling, and otherwise behaves like the first."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_models import Glued, Ids, Net, X, ask, assert_hit, cache_of, entries, fresh
from torch import nn

from helpers import assert_same, break_inference
from torchserve_openvino.cache.open import CacheSettings
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.errors import WeightsReleasedError


def fallbacks_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the fallbacks without the folder of their source file, which differs between workers."""
    return [found | {"where": Path(found["where"]).name} for found in report["fallbacks"]]


def cold_and_warm(kind: Any, folder: Path, *args: Any, **more: Any) -> tuple[Any, Any]:
    cold = fresh(kind().eval(), folder, **more)
    ask(cold, *args)
    warm = fresh(kind().eval(), folder, **more)
    ask(warm, *args)
    return cold, warm


@pytest.mark.parametrize("kind", [Net, Glued])
def test_a_warm_report_equals_the_cold_one(tmp_path: Path, kind: Any) -> None:
    cold, warm = cold_and_warm(kind, tmp_path / "c", X)
    assert_hit(warm)
    assert cache_of(cold)["status"] == "miss" and cache_of(cold)["nearest"] == {}
    a, b = cold.report.to_dict(), warm.report.to_dict()
    for name in ("ops_total", "ops_on_openvino", "coverage", "graphs", "partitions", "graph_breaks", "fallbacks",
                 "recompiles", "device", "precision"):  # fmt: skip
        assert a["summary"][name] == b["summary"][name], name
    assert fallbacks_of(a) == fallbacks_of(b) and cold.report.fallback_counts() == warm.report.fallback_counts()
    for first, second in zip(a["graphs"], b["graphs"], strict=True):
        for mine, other in zip(first["partitions"], second["partitions"], strict=True):
            for name in ("name", "ops", "op_counts", "inputs", "outputs", "constants", "constant_bytes", "runs_on"):
                assert mine.get(name) == other.get(name), name
            assert other["from_cache"] and not mine["from_cache"]
    assert warm.frozen == 1
    json.dumps(b)
    warm.report.to_text()


def test_a_warm_call_never_goes_through_dynamo(tmp_path: Path) -> None:
    ask(fresh(Glued().eval(), tmp_path / "c"), X)
    warm = fresh(Glued().eval(), tmp_path / "c")
    with torch.compiler.set_stance("force_eager"):
        for factor in (1, 2, 3):
            ask(warm, X * factor)
    assert_hit(warm)
    assert warm.report.fallback_counts() == {"unsupported_op": 1}


def test_fallbacks_of_options_come_back(tmp_path: Path) -> None:
    cold, warm = cold_and_warm(Net, tmp_path / "c", X, disabled_ops=["aten.relu"])
    assert_hit(warm)
    assert warm.report.fallback_counts() == cold.report.fallback_counts() == {"disabled_op": 1}
    assert fallbacks_of(warm.report.to_dict()) == fallbacks_of(cold.report.to_dict())


def test_a_partition_from_its_graph_where_the_blob_is_gone(tmp_path: Path) -> None:
    ask(fresh(Net().eval(), tmp_path / "c"), X)
    for entry in entries(tmp_path / "c", "blob"):
        Store(tmp_path / "c").discard("blob", entry.key)
    warm = fresh(Net().eval(), tmp_path / "c")
    ask(warm, X)
    cache = cache_of(warm)
    assert (cache["traces"], cache["compiles"], cache["imports"], cache["stored"]) == (0, 1, 0, 1)
    assert cache["status"] == "partial"
    again = fresh(Net().eval(), tmp_path / "c")
    ask(again, X)
    assert_hit(again)


def test_openvino_fails_on_a_warm_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(fresh(Glued().eval(), tmp_path / "c"), X)
    warm = fresh(Glued().eval(), tmp_path / "c")
    ask(warm, X)
    with monkeypatch.context() as patch:
        break_inference(patch)
        for factor in (1, 2):
            ask(warm, X * factor)
    assert warm.report.fallback_counts() == {"unsupported_op": 1, "runtime_failed": 4}
    assert any("device is gone" in fallback.reason for fallback in warm.report.fallbacks)
    ask(warm, X * 3)
    assert warm.report.fallback_counts()["runtime_failed"] == 4
    assert_hit(warm)


def test_openvino_fails_while_the_answer_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(fresh(Net().eval(), tmp_path / "c"), X)
    warm = fresh(Net().eval(), tmp_path / "c")
    with monkeypatch.context() as patch:
        break_inference(patch)
        ask(warm, X)
    assert warm.report.fallback_counts()["runtime_failed"] >= 1
    # The result came from eager, so it does not verify OpenVINO.
    assert cache_of(warm)["verified"]["signatures"] == 0


def test_integers_beyond_bounds_on_a_warm_worker(tmp_path: Path) -> None:
    ask(fresh(Ids(), tmp_path / "c"), torch.arange(4))
    warm = fresh(Ids(), tmp_path / "c")
    ask(warm, torch.arange(4))
    ask(warm, torch.tensor([1, 2, 3, 2**40]))
    ask(warm, torch.tensor([1, 2, 3, -(2**40)]))
    assert warm.report.fallback_counts() == {"runtime_failed": 2}
    ask(warm, torch.arange(4) * 5)
    assert_hit(warm)


def test_the_first_call_of_a_warm_worker_has_integers_beyond_bounds(tmp_path: Path) -> None:
    ask(fresh(Ids(), tmp_path / "c"), torch.arange(4))
    warm = fresh(Ids(), tmp_path / "c")
    ask(warm, torch.tensor([1, 2, 3, 2**40]))
    ask(warm, torch.arange(4))
    assert cache_of(warm)["verified"]["rejected"] == 0 and cache_of(warm)["traces"] == 0


def test_an_index_beyond_the_end_is_the_callers_error(tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2]])
    for _ in range(2):
        torch.manual_seed(0)
        compiled = fresh(nn.Embedding(10, 4), tmp_path / "c")
        ask(compiled, ids)
        with pytest.raises((IndexError, RuntimeError)), torch.no_grad():
            compiled(ids + 100)
        ask(compiled, ids * 3)
    assert_hit(compiled)


def test_a_first_call_that_raises_stores_nothing(tmp_path: Path) -> None:
    model = Net().eval()
    compiled = fresh(model, tmp_path / "c")
    for _ in range(2):
        with pytest.raises(Exception, match=r"shape|size|mat1"), torch.no_grad():
            compiled(torch.randn(2, 5))
    assert not entries(tmp_path / "c", "call")
    ask(compiled, X)


@pytest.mark.parametrize("kind", [Net, Ids])
def test_release_weights_of_a_warm_model(tmp_path: Path, kind: Any) -> None:
    x = X if kind is Net else torch.arange(4)
    reference = kind().eval()
    ask(fresh(kind().eval(), tmp_path / "c", own_weights=True), x)
    warm = fresh(kind().eval(), tmp_path / "c", own_weights=True)
    ask(warm, x)
    assert_hit(warm)
    warm.release_weights()
    assert warm.released and all(p.numel() == 0 for p in warm.eager.parameters())
    for factor in (1, 2):
        ask(warm, x * factor, eager=reference)
    with pytest.raises(WeightsReleasedError), torch.no_grad():
        warm(x[:1])


def test_a_warm_model_that_shares_a_blob_with_one_that_owns_its_weights(tmp_path: Path) -> None:
    ask(fresh(Net().eval(), tmp_path / "c"), X)
    warm = fresh(Net().eval(), tmp_path / "c", own_weights=True)
    ask(warm, X)
    assert_hit(warm)
    warm.release_weights()
    ask(warm, X * 2, eager=Net().eval())
    for entry in entries(tmp_path / "c"):
        Store(tmp_path / "c").discard(entry.kind, entry.key)
    ask(warm, X * 3, eager=Net().eval())


def test_somebody_else_compares(tmp_path: Path) -> None:
    cold = fresh(Net().eval(), tmp_path / "c")
    ask(cold, X)
    ask(cold, torch.cat([X, X]))
    warm = fresh(Net().eval(), tmp_path / "c", cache=CacheSettings(proves=False))
    ask(warm, X)
    assert cache_of(warm)["verified"]["signatures"] == 0
    warm.confirm_cached()
    assert cache_of(warm)["verified"]["signatures"] == 1
    # Nobody compares what comes later.
    ask(warm, torch.cat([X, X]))
    assert cache_of(warm)["verified"]["signatures"] == 2
    assert warm.reject_cached()
    assert cache_of(warm)["verified"]["rejected"] == 2 and not entries(tmp_path / "c", "call", "partition")
    again = fresh(Net().eval(), tmp_path / "c")
    ask(again, X)
    assert cache_of(again)["traces"] == 1


@pytest.mark.parametrize("warm", [False, True])
def test_threads_make_the_first_call_at_once(tmp_path: Path, warm: bool) -> None:
    if warm:
        ask(fresh(Glued().eval(), tmp_path / "c"), X)
    model = Glued().eval()
    compiled = fresh(model, tmp_path / "c")
    barrier, errors = threading.Barrier(6), []

    def work(number: int) -> None:
        try:
            barrier.wait()
            with torch.no_grad():
                for i in range(5):
                    x = X * (number + i)
                    assert_same(compiled(x), model(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    cache = cache_of(compiled)
    assert cache["calls"] == ({"hits": 1, "misses": 0} if warm else {"hits": 0, "misses": 1}), cache
    assert (cache["traces"], cache["compiles"]) == ((0, 0) if warm else (1, 2)), cache


def test_a_lock_that_another_process_keeps(tmp_path: Path) -> None:
    ask(fresh(Net().eval(), tmp_path / "other"), X)
    (call,) = entries(tmp_path / "other", "call")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with Store(tmp_path / "c").lock("call", call.key) as got:
            assert got
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    try:
        started = time.monotonic()
        compiled = fresh(Net().eval(), tmp_path / "c", cache=CacheSettings(lock_seconds=0.3))
        ask(compiled, X)
        assert time.monotonic() - started < 30
    finally:
        done.set()
        thread.join()
    cache = cache_of(compiled)
    assert cache["store"]["lock_timeouts"] == 1 and cache["traces"] == 1
    warm = fresh(Net().eval(), tmp_path / "c")
    ask(warm, X)
    assert_hit(warm)


def test_packaged_entries_are_read_and_new_ones_go_to_the_own_folder(tmp_path: Path) -> None:
    ask(fresh(Net().eval(), tmp_path / "packed"), X)
    before = len(entries(tmp_path / "packed"))
    warm = fresh(Net().eval(), tmp_path / "c", cache=CacheSettings(packaged=tmp_path / "packed"))
    ask(warm, X)
    assert_hit(warm)
    ask(warm, X[:1])
    assert len(entries(tmp_path / "packed")) == before and len(entries(tmp_path / "c", "call")) == 1


def test_a_blob_for_any_cpu_of_this_level(tmp_path: Path) -> None:
    ask(fresh(Net().eval(), tmp_path / "c", cache=CacheSettings(for_level=True)), X)
    warm = fresh(Net().eval(), tmp_path / "c")
    ask(warm, X)
    assert_hit(warm)


# --- processes --------------------------------------------------------------------------------------------------

PROCESS = """
import json, sys
import torch
import torchserve_openvino as tov
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)
    def forward(self, x):
        return self.second(torch.digamma(torch.relu(self.first(x)) + 2))
model = Net().eval()
compiled = tov.compile(model, options={"model_caching": True, "cache_dir": sys.argv[1]}).freeze()
x = torch.linspace(-2, 3, 12).reshape(2, 6)
print("ready", flush=True)
sys.stdin.readline()
with torch.no_grad():
    for factor in (1, 2, 3):
        got, expected = compiled(x * factor), model(x * factor)
        assert got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-4, atol=1e-4)
report = compiled.report.to_dict()
heavy = sorted(sys.modules.keys() & {"torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd"})
print(json.dumps([report["cache"], report["summary"]["coverage"], report["fallbacks"], heavy]))
"""


def start(folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROCESS, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str]") -> list[Any]:
    out, _ = process.communicate("\n", timeout=120)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


def test_a_warm_process_never_imports_dynamo(tmp_path: Path) -> None:
    cold, warm = finish(start(tmp_path / "c")), finish(start(tmp_path / "c"))
    assert cold[0]["status"] == "miss" and "torch._dynamo" in cold[3]
    assert warm[0]["status"] == "hit" and (warm[0]["traces"], warm[0]["compiles"], warm[0]["imports"]) == (0, 0, 2)
    assert warm[0]["verified"]["signatures"] == 1 and warm[0]["calls"] == {"hits": 1, "misses": 0}
    assert warm[1:3] == cold[1:3]
    assert warm[3] == []


@pytest.mark.slow
def test_eight_processes_race(tmp_path: Path) -> None:
    processes = [start(tmp_path / "c") for _ in range(8)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        found = [finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert sorted(result[0]["traces"] for result in found) == [0] * 7 + [1]
    assert sorted(result[0]["compiles"] for result in found) == [0] * 7 + [2]
    assert sorted(result[0]["status"] for result in found) == ["hit"] * 7 + ["miss"]
    assert all(result[0]["verified"]["rejected"] == 0 and result[1:3] == found[0][1:3] for result in found)
    assert not Store(tmp_path / "c").verify()
