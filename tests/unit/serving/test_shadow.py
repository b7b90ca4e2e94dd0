"""Eager PyTorch answers some requests again, after their responses were sent."""

import json
import logging
import math
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_worker import NETWORK, WARMUP, network, save_weights, sent
from torch import nn

from encoder import ENCODER, IDS, MASK, save_encoder
from torchserve_openvino.backend.runtime.execute import CompiledPartition
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.policy import PolicyWatch
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.serving.verification import shadow
from torchserve_openvino.serving.verification.sampling import Sampler
from torchserve_openvino.serving.verification.shadow import read_mismatch
from torchserve_openvino.serving.verification.yielding_mode import IdleGate, ShuttingDownError, why_not
from torchserve_openvino.tasks.tensor import TensorHandler

F32 = {"compile": {"backend": "openvino", "options": {"config": {"INFERENCE_PRECISION_HINT": "f32"}}}}
ROW = [[0.5, -1.0, 2.0, 0.1]]
LARGE = [[50.0, -1.0, 2.0, 0.1]]


def settings(warmup: Any = WARMUP, **verify: Any) -> dict[str, Any]:
    section = {"shadow": 1.0, "shadow_budget": 1.0, **verify}
    return {"pt2": F32, "handler": {"openvino": {"warmup": warmup, "verify": section}}}


def started(archive, config=None, **arguments):
    made = archive(config or settings(), **({"weights": save_weights} | arguments))
    handler = TensorHandler()
    handler.initialize(made.context)
    return made, handler


def facts(handler) -> dict[str, Any]:
    found = handler.describe_handle()["verify"]["shadow"]
    return json.loads(json.dumps(found, allow_nan=False))


def settled(handler, count: int) -> dict[str, Any]:
    """Waits until `count` requests were checked or skipped; returns the facts."""
    deadline = time.monotonic() + 30
    while (found := facts(handler))["checked"] + found["skipped"] < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    return found


@pytest.fixture
def faulty(monkeypatch):
    """Returns a function that makes OpenVINO wrong from then on, for calls with a value above 10."""

    def begin() -> None:
        right = CompiledPartition.run

        def run(self, args):
            results = right(self, args)
            return [r + 0.5 for r in results] if any(bool((a > 10).any()) for a in args) else results

        monkeypatch.setattr(CompiledPartition, "run", run)

    return begin


def test_right_answers_are_checked_and_none_differs(archive, caplog) -> None:
    caplog.set_level(logging.INFO)
    made, handler = started(archive)
    assert facts(handler)["checked"] == 0
    assert [value for value, _ in sent(caplog, "openvino_shadow_mismatches_total")] == ["0"]
    for _ in range(3):
        made.handle(handler, ROW)
    found = settled(handler, 3)
    assert (found["checked"], found["mismatches"], found["skipped"]) == (3, 0, 0)
    assert 0 <= found["worst"] < 1e-5 and found["seconds"] > 0 and found["why_not"] == ""
    assert "3 request(s) checked, 0 differed" in worker_of(handler).report.to_text()


def test_a_fault_of_some_inputs_is_found_counted_kept_and_replayed(archive, faulty, tmp_path, caplog) -> None:
    folder = tmp_path / "kept"
    made, handler = started(archive, settings(keep_mismatches=str(folder)))
    faulty()
    for body in (ROW, LARGE, ROW, LARGE):
        made.handle(handler, body)
    found = settled(handler, 4)
    assert (found["checked"], found["mismatches"], found["kept"]) == (4, 2, 1)
    assert found["worst"] == pytest.approx(0.5, rel=1e-3)
    assert sum("differs from eager" in record.message for record in caplog.records) == 1
    assert handler.describe_handle()["serving"]["policy"]["holds"]

    (plain,) = folder.glob("*.json")
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]
    assert plain.stem in caplog.text
    kept = read_mismatch(plain)
    assert torch.equal(kept.args[0], torch.tensor(LARGE)) and kept.kwargs == {}
    with torch.inference_mode():
        torch.testing.assert_close(network()(*kept.args, **kept.kwargs), kept.expected[0])
    torch.testing.assert_close(kept.answer[0], kept.expected[0] + 0.5)
    assert kept.facts["model"] == "net" and "differs by 0.5" in kept.facts["problems"][0]


def test_refuse_ends_the_worker_at_the_next_request(archive, faulty, sockets) -> None:
    made, handler = started(archive, settings(on_shadow_mismatch="refuse"))
    made.context.cl_socket, _ = sockets
    faulty()
    assert made.handle(handler, LARGE) and made.status(0) == 200
    assert settled(handler, 1)["mismatches"] == 1
    policy = handler.describe_handle()["serving"]["policy"]
    assert not policy["holds"] and "verify.shadow" in policy["violations"][0]
    with pytest.raises(SystemExit):
        made.handle(handler, ROW)


def test_a_mismatch_is_counted_after_its_callback(archive, faulty, monkeypatch) -> None:
    made, handler = started(archive, settings(on_shadow_mismatch="refuse"))
    shadow, seen = worker_of(handler).served.shadow, []
    broken = PolicyWatch.broken

    def observed(self, sentence: str) -> None:
        seen.append(shadow.to_dict()["mismatches"])
        broken(self, sentence)

    monkeypatch.setattr(PolicyWatch, "broken", observed)
    faulty()
    made.handle(handler, LARGE)
    assert settled(handler, 1)["mismatches"] == 1 and seen == [0]


def test_off_by_default(archive) -> None:
    made, handler = started(archive, {"pt2": F32, "handler": {"openvino": {"warmup": WARMUP}}})
    made.handle(handler, ROW)
    report = handler.describe_handle()
    assert "shadow" not in report["verify"] and worker_of(handler).served.shadow is None


RANDOM = NETWORK.replace(".relu())", ".relu()) + torch.rand(3)")
COUNTING = NETWORK.replace("self.first, ", "self.register_buffer('seen', torch.zeros(())); self.first, ").replace(
    "return", "self.seen.add_(1); return"
)
REMEMBERING = NETWORK.replace("return", "self.last_shape = self.__dict__.get('last_shape', 0) + 1; return")


@pytest.mark.parametrize(
    ("source", "why"),
    [(RANDOM, "random numbers"), (COUNTING, "its own weights or buffers"), (REMEMBERING, "keeps state")],
)
def test_a_model_that_can_not_be_run_again_is_left_alone(archive, source: str, why: str) -> None:
    config = settings(on_violation="warn")
    made, handler = started(archive, config, model_file=source, weights=None)
    seen = getattr(worker_of(handler).eager_model, "seen", torch.zeros(())).clone()
    found = facts(handler)
    assert why in found["why_not"] and found["checked"] == 0
    assert any(why in note for note in handler.describe_handle()["notes"])
    made.handle(handler, ROW)
    found = facts(handler)
    assert (found["checked"], found["waiting"], found["skipped"]) == (0, 0, 0)
    if source == COUNTING:
        assert torch.equal(worker_of(handler).eager_model.seen, seen + 1)


class Dropping(nn.Module):
    """Draws random numbers in evaluation mode too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, training=True)


class Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)


@pytest.mark.parametrize(
    ("model", "draws"),
    [
        (nn.Sequential(nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.Dropout1d(0.5), nn.RReLU()), False),
        (nn.LSTM(8, 8, num_layers=2, dropout=0.5), False),
        (nn.TransformerEncoderLayer(8, 2, dropout=0.5, batch_first=True), False),
        (Attending(0.0), False),
        (nn.BatchNorm1d(3), False),
        (Attending(0.5), True),
        (Dropping(), True),
    ],
)
def test_what_draws_random_numbers(model: nn.Module, draws: bool) -> None:
    call = ((torch.randn(2, 3, 8),), {})
    generator = torch.get_rng_state()
    reason = why_not(model.eval(), call)
    assert ("draws random numbers" in reason) == draws, reason
    assert draws or reason == ""
    assert torch.equal(generator, torch.get_rng_state())


def test_requests_come_first(archive, monkeypatch) -> None:
    """The eager run pauses at the next operator while a request is in progress, and continues after it."""
    made, handler = started(archive)
    state = worker_of(handler).state
    reached, passed = threading.Event(), threading.Event()
    model = network()

    def slow(x: torch.Tensor) -> torch.Tensor:
        reached.set()
        assert passed.wait(10)
        return model(x)

    monkeypatch.setattr(worker_of(handler).eager_model, "forward", slow)
    made.handle(handler, ROW)
    assert reached.wait(10)
    state.before_call()
    passed.set()
    time.sleep(0.3)
    assert facts(handler)["checked"] == 0
    state.after_call(None)
    found = settled(handler, 1)
    assert found["checked"] == 1 and found["seconds"] < 0.2


def test_an_interrupted_run_does_not_disturb_guarded_calls(archive) -> None:
    """torch's own dispatch modes set process-wide flags that Dynamo's guards check; the shadow run must not."""
    config = settings()
    config["handler"]["openvino"]["freeze"] = False
    made, handler = started(archive, config)
    reached, passed = threading.Event(), threading.Event()
    model = network()

    def slow(x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name != "openvino-shadow":
            return model(x)
        reached.set()
        assert passed.wait(10)
        return model(x)

    made.handle(handler, ROW)
    settled(handler, 1)
    worker_of(handler).served.shadow._eager = slow
    made.handle(handler, ROW)
    assert reached.wait(10)
    for _ in range(3):
        made.handle(handler, ROW)
        assert made.status(0) == 200
    passed.set()
    report = handler.describe_handle()
    assert settled(handler, 5)["mismatches"] == 0
    assert report["fallbacks"] == [] and report["serving"]["compiles_after_ready"] == 0
    assert report["summary"]["recompiles"] == 0


def test_changed_weights_are_not_compared(archive) -> None:
    _made, handler = started(archive)
    worker_of(handler).state.before_call()
    handler.model(torch.tensor(ROW))
    with torch.no_grad():
        worker_of(handler).eager_model.last.bias.add_(1.0)
    worker_of(handler).state.after_call(None)
    assert settled(handler, 1)["why_skipped"] == {"the weights changed": 1}


def test_what_eager_refuses_is_a_mismatch_too(archive, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    made, handler = started(archive)

    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise IndexError("beyond the end")

    monkeypatch.setattr(worker_of(handler).eager_model, "forward", refuse)
    made.handle(handler, ROW)
    found = settled(handler, 1)
    assert (found["mismatches"], found["worst"]) == (1, "inf")
    # Its thread sends the metrics after it has counted.
    worker_of(handler).served.shadow.stop()
    value, _ = sent(caplog, "openvino_shadow_largest_difference")[-1]
    assert float(value) == sys.float_info.max


def test_a_full_queue_skips_and_counts(archive, monkeypatch) -> None:
    monkeypatch.setattr(shadow, "MAX_WAITING", 2)
    _made, handler = started(archive)
    worker_of(handler).state.before_call()
    for _ in range(5):
        handler.model(torch.tensor(ROW))
    assert (facts(handler)["waiting"], facts(handler)["why_skipped"]) == (2, {"the queue is full": 3})
    worker_of(handler).state.after_call(None)
    assert settled(handler, 5)["checked"] == 2


def test_the_budget_spaces_the_runs(archive, monkeypatch) -> None:
    made, handler = started(archive, settings(shadow_budget=0.1))
    model = network()

    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return model(x)

    monkeypatch.setattr(worker_of(handler).eager_model, "forward", slow)
    start = time.monotonic()
    for _ in range(2):
        made.handle(handler, ROW)
    found = settled(handler, 2)
    assert found["checked"] == 2 and found["seconds"] >= 0.1 and time.monotonic() - start > 0.5


def test_padded_and_joined_requests_are_compared_as_they_came(archive, monkeypatch) -> None:
    config = settings({"inputs": [IDS, MASK]})
    config["handler"]["openvino"]["batching"] = {"dims": {"sequence": [4, 8]}}
    made, handler = started(archive, config, model_file=ENCODER, batch_size=2, weights=save_encoder)
    lengths: list[tuple[int, ...]] = []
    forward = worker_of(handler).eager_model.forward

    def noted(ids, mask=None):
        lengths.append(tuple(ids.shape))
        return forward(ids, mask)

    monkeypatch.setattr(worker_of(handler).eager_model, "forward", noted)
    made.handle(handler, {"inputs": {"ids": [[1, 2, 3]]}}, {"inputs": {"ids": [[7, 8]]}})
    made.handle(handler, {"inputs": {"ids": [[5, 6, 7, 8, 9]]}})
    found = settled(handler, 3)
    assert (found["checked"], found["mismatches"]) == (3, 0), found
    assert sorted(lengths) == [(1, 2), (1, 3), (1, 5)]


def test_the_thread_ends_when_nothing_waits_and_on_stop(archive) -> None:
    made, handler = started(archive)
    made.handle(handler, ROW)
    settled(handler, 1)
    deadline = time.monotonic() + 5
    while any(thread.name == "openvino-shadow" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker_of(handler).state.before_call()
    handler.model(torch.tensor(ROW))
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "openvino-shadow")
    assert thread.daemon
    worker_of(handler).served.shadow.stop()
    assert not thread.is_alive()


@pytest.mark.parametrize("share", [0.001, 0.03, 0.3, 0.6, 0.95, 1.0])
def test_the_share_is_exact_and_the_places_are_not_known(share: float) -> None:
    def picked(seed: int | None) -> list[int]:
        sampler = Sampler(share, seed)
        return [i for i in range(10_000) if sampler.picks()]

    for seed in (None, 1, 2):
        assert abs(len(picked(seed)) - share * 10_000) <= 2
    if share < 1:
        assert picked(None) != picked(None)
    assert not any(Sampler(0.0).picks() for _ in range(100))


def test_the_folder_has_limits(tmp_path: Path, monkeypatch) -> None:
    folder = shadow.MismatchFolder(tmp_path / "new" / "kept")
    assert stat.S_IMODE((tmp_path / "new" / "kept").stat().st_mode) == 0o700
    monkeypatch.setattr(shadow, "MAX_MISMATCHES", 2)
    one = torch.ones(2)
    call = (({"a": [one, 3, None]}, "text"), {"b": torch.tensor([1 + 2j])})
    assert [folder.keep(f"d{i}", call, [one], [], {"note": 1, "format": 9}) for i in range(2)] == ["", ""]
    assert "holds 2" in folder.keep("d2", call, [one], [one], {})
    assert folder.keep("d1", call, [one], [one], {}) == ""
    kept = read_mismatch(tmp_path / "new" / "kept" / "d1.json")
    assert kept.args[1] == "text" and kept.args[0]["a"][1:] == [3, None]
    assert torch.equal(kept.kwargs["b"], call[1]["b"]) and kept.expected == [] and kept.facts == {"note": 1}
    monkeypatch.setattr(shadow, "MAX_MISMATCHES", 9)
    monkeypatch.setattr(shadow, "MAX_BYTES", 100)
    assert "more than" in folder.keep("d3", call, [one], [one], {})
    assert "object among the inputs" in folder.keep("d4", ((object(),), {}), [one], [one], {})


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o722, 0o770])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ModelLoadError, match=r"shared is writable by other users .*shared/keep_mismatches"):
        shadow.MismatchFolder(folder)
    assert not list(folder.iterdir())
    # What the message says.
    shadow.MismatchFolder(folder / "mismatches")
    assert stat.S_IMODE((folder / "mismatches").stat().st_mode) == 0o700


def test_a_difference_may_be_nan(tmp_path: Path) -> None:
    folder = shadow.MismatchFolder(tmp_path)
    assert folder.keep("d", ((float("nan"),), {}), [], [], {"worst": float("nan")}) == ""
    assert math.isnan(read_mismatch(tmp_path / "d.json").facts["worst"])


def test_a_folder_that_can_not_be_written_is_an_error_at_load(archive, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="keep_mismatches"):
        started(archive, settings(keep_mismatches=str(tmp_path / "file" / "below")))


def test_quiet_waits_for_requests_and_can_be_closed() -> None:
    quiet = IdleGate(0.02)
    quiet.wait()
    quiet.began()
    assert quiet.disturbed
    done = threading.Event()

    def waiting() -> None:
        quiet.wait()
        done.set()

    thread = threading.Thread(target=waiting)
    thread.start()
    assert not done.wait(0.05)
    quiet.ended()
    assert done.wait(5) and quiet.waited >= 0.02
    thread.join()
    quiet.close()
    with pytest.raises(ShuttingDownError):
        quiet.wait()
    with pytest.raises(ShuttingDownError):
        quiet.pause(10)
