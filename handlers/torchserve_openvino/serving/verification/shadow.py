"""Verification in production: eager PyTorch answers a share of the requests again, while no request is in progress.

A picked request is copied with its answer and put into a short queue. A background thread takes it from there once no
request is in progress, runs the eager model, pauses between two operators whenever a request arrives, and compares as
verification does before READY.
"""

import atexit
import json
import logging
import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.errors import is_out_of_memory
from torchserve_openvino.files.atomic import write_atomically
from torchserve_openvino.files.json_text import read_json_object
from torchserve_openvino.serving.loading.files import private_folder
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.verification.judge import Judge, Verdict
from torchserve_openvino.serving.verification.sampling import (
    SampledCall,
    Sampler,
    answered,
    sample_of,
    tensor_bytes,
    weight_versions,
)
from torchserve_openvino.serving.verification.yielding_mode import IdleGate, ShuttingDownError, Unrepeatable, run_again

logger = logging.getLogger(__name__)

# Limits of the queue; samples beyond them are skipped, and counted.
MAX_WAITING = 16
MAX_WAITING_BYTES = 256 * 1024 * 1024
# How many logged digests are remembered; beyond that, a repeated mismatch is logged again.
_MAX_LOGGED = 1024
_FULL = "the queue is full"
_SECONDS_TO_STOP = 5.0


class Shadow:
    """Runs a share of the requests again in eager PyTorch, and compares the answers.

    Args:
        eager: The model in PyTorch.
        section: ``handler.openvino.verify``.
        judge: Judges each answer.
        reason_against: Why this model can't be run again; nothing is picked then.
        ran: Whether the model is known to run in eager PyTorch, so that an exception there counts as a mismatch.
        facts: Stored with each mismatch.

    Attributes:
        quiet: Must be notified when a request begins and ends.
        on_mismatch: Called with what is wrong, before the mismatch is counted, so that what the callback does is
            visible before the count.
        on_change: Called after each comparison, and when comparisons end for good.
    """

    def __init__(
        self,
        eager: Callable[..., Any],
        section: VerifySection,
        judge: Judge,
        *,
        reason_against: str = "",
        ran: bool = False,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.quiet = IdleGate()
        self.on_mismatch: Callable[[str], None] = lambda problem: None
        self.on_change: Callable[[], None] = lambda: None
        self._eager, self._section, self._judge = eager, section, judge
        self._facts = facts or {}
        self._sampler = Sampler(section.shadow)
        self._folder = MismatchFolder(Path(section.keep_mismatches)) if section.keep_mismatches else None
        self._lock = threading.Lock()
        self._waiting: deque[SampledCall] = deque()
        self._bytes = 0
        self._thread: threading.Thread | None = None
        self._next = 0.0
        self._why_not, self._ran = reason_against, ran
        self._logged: set[str] = set()
        self._checked = self._mismatches = self._kept = 0
        self._skipped: Counter[str] = Counter()
        self._not_kept: Counter[str] = Counter()
        self._worst, self._seconds = 0.0, 0.0
        # A thread that is inside an operator during interpreter shutdown would crash the process.
        atexit.register(_stop_at_exit, weakref.ref(self))

    # --- in the request -------------------------------------------------------------------------------------

    def take(self, inputs: Callable[[], Inputs]) -> SampledCall | None:
        """Returns a copy of a call's inputs if the call is picked; to be used before the call runs.

        Args:
            inputs: Returns what the caller passed; called only if the call is picked.
        """
        if self._why_not or not self._sampler.picks():
            return None
        call = inputs()
        if not self._room(tensor_bytes(call)):
            self.skip(_FULL)
            return None
        try:
            return sample_of(call, self._eager)
        except TypeError as error:
            self.skip(str(error))
            return None

    def put(self, sample: SampledCall, output: Any) -> None:
        """Queues a sample with the answer of its call."""
        size = tensor_bytes(output)
        with self._lock:
            if not self._room(sample.size + size):
                self._skipped[_FULL] += 1
                return
            answered(sample, output)
            self._waiting.append(sample)
            self._bytes += sample.size
            if self._thread is None:
                # A daemon thread does not keep the worker alive.
                self._thread = threading.Thread(target=self._work, name="openvino-shadow", daemon=True)
                self._thread.start()

    def skip(self, reason: str) -> None:
        """Counts a picked call that is not compared."""
        with self._lock:
            self._skipped[reason] += 1

    def _room(self, size: int) -> bool:
        return len(self._waiting) < MAX_WAITING and self._bytes + size <= MAX_WAITING_BYTES

    # --- beside the requests --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends the thread, at the latest after the operator that is running."""
        self.quiet.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=_SECONDS_TO_STOP)

    def _work(self) -> None:
        """Checks the queued samples, and ends when the queue is empty."""
        try:
            while True:
                self.quiet.pause(self._next - time.monotonic())
                self.quiet.wait()
                sample = self._waiting[0]
                try:
                    self._check(sample)
                except Exception as error:
                    # A bug in the comparison must not end all further ones, nor count as a correct answer.
                    logger.exception("verify.shadow: a comparison failed")
                    self.skip(f"the comparison failed: {type(error).__name__}")
                with self._lock:
                    self._waiting.popleft()
                    self._bytes -= sample.size
                    if not self._waiting:
                        self._thread = None
                        return
        except ShuttingDownError:
            return

    def _check(self, sample: SampledCall) -> None:
        if self._why_not:
            self.skip(self._why_not)
            return
        if weight_versions(self._eager) != sample.weights:
            self.skip("the weights changed")
            return
        start, waited = time.monotonic(), self.quiet.waited
        try:
            expected, error = run_again(self._eager, sample, self.quiet), None
        except Unrepeatable as reason:
            self._give_up(str(reason))
            return
        except Exception as raised:
            # Any exception may be a finding: the compiled model answered the same call.
            expected, error = [], raised
        finally:
            took = time.monotonic() - start - (self.quiet.waited - waited)
            self._seconds += took
            self._next = time.monotonic() + took * (1.0 / self._section.shadow_budget - 1.0)
        if error is not None and (not self._ran or is_out_of_memory(error)):
            self.skip(f"eager PyTorch raises {type(error).__name__}")
            return
        if weight_versions(self._eager) != sample.weights:
            self.skip("the weights changed")
            return
        self._ran = True
        self._compare(sample, expected, error)

    def _compare(self, sample: SampledCall, expected: list[torch.Tensor], error: Exception | None) -> None:
        if error is None:
            verdict = self._judge.judge(sample.output, expected)
        else:
            verdict = Verdict([f": eager PyTorch raises {type(error).__name__} but an answer was sent: {error}"])
        problems = verdict.problems
        # An output of another shape has no numeric difference.
        figures = [output.get("max_abs", math.inf) for output in verdict.outputs] or ([math.inf] if problems else [0.0])
        try:
            if problems:
                self.on_mismatch(self._reported(sample, expected, problems))
        finally:
            with self._lock:
                self._checked += 1
                self._mismatches += bool(problems)
                self._worst = max([self._worst, *(figure for figure in figures if figure is not None)])
        self.on_change()

    def _reported(self, sample: SampledCall, expected: list[torch.Tensor], problems: list[str]) -> str:
        """Logs and keeps a mismatch, once for the same inputs; returns its description."""
        digest = sample.digest
        problem = f"request {digest}{'; '.join(problems)}"
        if digest in self._logged:
            return problem
        if len(self._logged) < _MAX_LOGGED:
            self._logged.add(digest)
        logger.warning("verify.shadow: an answer that was sent differs from eager PyTorch's: %s", problem)
        if self._folder is not None:
            facts = {**self._facts, "precision": self._judge.precision, "problems": problems}
            modes = {"inference_mode": sample.inference, "grad": sample.grad, "autocast": str(sample.autocast or "")}
            reason = self._folder.keep(digest, sample.inputs, sample.output, expected, {**facts, "modes": modes})
            if reason:
                logger.warning("verify.keep_mismatches: request %s is not kept: %s", digest, reason)
                self._not_kept[reason] += 1
            else:
                self._kept += 1
        return problem

    def _give_up(self, reason: str) -> None:
        self._why_not = reason
        logger.warning("verify.shadow ends: %s", reason)
        self.skip(reason)
        self.on_change()

    def to_dict(self) -> dict[str, Any]:
        """Returns, JSON-safe, share, counts, largest difference (text where infinite), seconds, what is skipped."""
        with self._lock:
            return {
                "share": self._section.shadow,
                "checked": self._checked,
                "mismatches": self._mismatches,
                "worst": self._worst if math.isfinite(self._worst) else str(self._worst),
                "seconds": round(self._seconds, 4),
                "waiting": len(self._waiting),
                "skipped": self._skipped.total(),
                "why_skipped": dict(self._skipped),
                "kept": self._kept,
                "not_kept": dict(self._not_kept),
                "why_not": self._why_not,
            }


def _stop_at_exit(shadow: "weakref.ref[Shadow]") -> None:
    if (mode := shadow()) is not None:
        mode.stop()


# --- A folder of calls whose answers differed from eager's, kept as tensors and JSON so that a person can rerun them
# A mismatch is two files, private to the user that the worker runs as: ``DIGEST.safetensors`` with the tensors, and
# ``DIGEST.json``, which is written last and describes them. Reading them executes no code.


# Limits of a folder, for all workers that write to it together.
MAX_MISMATCHES = 16
MAX_BYTES = 256 * 1024 * 1024
_FORMAT = 1


@dataclass(frozen=True)
class Mismatch:
    """A kept call; ``model(*args, **kwargs)`` runs it again.

    Attributes:
        answer: Tensors of the answer that was sent.
        expected: Those of eager's answer; empty where it raised.
        facts: What else is known: model, precision, problems, versions.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: list[torch.Tensor]
    expected: list[torch.Tensor]
    facts: dict[str, Any]


class MismatchFolder:
    """Keeps mismatches, up to `MAX_MISMATCHES` and `MAX_BYTES`.

    Args:
        folder: ``handler.openvino.verify.keep_mismatches``; created where it is missing.

    Raises:
        ModelLoadError: The folder can't be created or written to, or others may write to it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        private_folder(folder, "handler.openvino.verify.keep_mismatches")

    def keep(
        self,
        digest: str,
        inputs: Inputs,
        answer: Sequence[torch.Tensor],
        expected: Sequence[torch.Tensor],
        facts: dict[str, Any],
    ) -> str:
        """Writes one mismatch; one that is there already is left unchanged.

        Returns:
            Why it is not kept; empty where it is.
        """
        if (self._folder / f"{digest}.json").exists():
            return ""
        tensors: dict[str, torch.Tensor] = {}
        try:
            call = _encode(list(inputs), "input", tensors)
            for name, values in (("answer", answer), ("eager", expected)):
                tensors |= {f"{name}.{i}": value.contiguous().clone() for i, value in enumerate(values)}
            content = safetensors.torch.save(tensors)
            if reason := self._full(len(content)):
                return reason
            plain = {**facts, "format": _FORMAT, "call": call, "answers": len(answer), "expected": len(expected)}
            write_atomically(self._folder / f"{digest}.safetensors", content)
            write_atomically(self._folder / f"{digest}.json", json.dumps(plain, indent=2).encode())
        except (OSError, TypeError, ValueError, KeyError) as error:
            # For example a full disk, or a dtype that safetensors does not support.
            return f"{type(error).__name__}: {error}"
        return ""

    def _full(self, more: int) -> str:
        files = [entry for entry in self._folder.iterdir() if entry.is_file()]
        if sum(entry.suffix == ".json" for entry in files) >= MAX_MISMATCHES:
            return f"the folder holds {MAX_MISMATCHES} mismatches"
        if sum(entry.stat().st_size for entry in files) + more > MAX_BYTES:
            return f"the folder would hold more than {MAX_BYTES // 1024**2} MB"
        return ""


def read_mismatch(path: Path) -> Mismatch:
    """Reads a kept call.

    Args:
        path: Its ``.json``; the file with the tensors is in the same folder.
    """
    # A difference may be NaN.
    plain = read_json_object(path, allow_nan=True)
    if plain.pop("format") != _FORMAT:
        raise ValueError(f"{path.name} was written by another version")
    tensors = safetensors.torch.load_file(path.with_suffix(".safetensors"))
    args, kwargs = _decode(plain.pop("call"), tensors)
    answer = [tensors[f"answer.{i}"] for i in range(plain.pop("answers"))]
    expected = [tensors[f"eager.{i}"] for i in range(plain.pop("expected"))]
    return Mismatch(args, kwargs, answer, expected, plain)


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Encodes a call as JSON: tensors by their names, everything else by value."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().contiguous().clone()
        return {"tensor": name}
    if kind in {tuple, list}:
        return {kind.__name__: [_encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _encode(item, f"{name}.{key}", tensors) for key, item in value.items()}}
    if value is None or kind in {bool, int, float, str}:
        return {"value": value}
    raise TypeError(f"a {kind.__name__} among the inputs has no plain form")


def _decode(value: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content.items()}
    if kind in {"tuple", "list"}:
        items = [_decode(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    return content
