"""Checks text generation over REST on a real TorchServe, and prints a figure for each promise.

    python scripts/benchmarks/generation_checks.py
    python scripts/benchmarks/generation_checks.py --only tokens,lengths --json checks.json
    python scripts/benchmarks/generation_checks.py --only soak --requests 10000

- tokens: eight prompts of different lengths at once; how many greedy tokens are eager PyTorch's (Llama with
  grouped-query attention, Qwen2, GPT-2).
- lengths: random prompts; what was compiled after READY.
- first: time to the first token of a short prompt, alone and while a long prompt is computed.
- soak: random requests, a third of them bad, others sampled, streamed or given up, and the process that generates
  killed in the middle; answers that got lost or are wrong, and memory.
- kill: random requests, and the worker itself killed twice; the same.
- start: the engine from a warm cache against OpenVINO GenAI bare, processes that load the 124 M model and generate one
  token.
- worker_start: the same for workers of TorchServe; the other has a plain handler with GenAI.

Models have random weights. Needs the extra `generate`.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from benchmarks import output
from benchmarks.servers.generators import Served, Tokens, answer_of, drawn, greedy, model_of, served
from benchmarks.startups.generation import starts
from benchmarks.startups.generation_workers import worker_starts

KINDS = ("llama", "qwen2", "gpt2")
_LENGTHS = (3, 700, 17, 128, 31, 33, 260, 1)
_KNOWN = 60
_ANSWER = 12
_CLIENTS = 16
_BROKEN = "failed: the answer broke off"


def tokens(work: Path, count: int) -> dict[str, Any]:
    """Eight prompts at once for each architecture, each for 256 tokens."""
    results = {}
    for kind in KINDS:
        output.progress.print(f"tokens: {kind}")
        model, draw = model_of(kind), random.Random(0)
        prompts = [drawn(draw, length) for length in _LENGTHS]
        with served(model, kind, work) as one, ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: one.ask(prompt, 256), prompts))
            report = one.describe()
        expected = [greedy(model, prompt, 256) for prompt in prompts]
        got = [answer_of(answer) for answer in answers]
        equal = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(got, expected, strict=True)]
        results[kind] = {"equal_of_256": equal, "coverage": report["summary"]["coverage"]}
    return results


def lengths(work: Path, count: int) -> dict[str, Any]:
    """Random prompts of random lengths, eight at a time."""
    count = min(count, 1000)
    draw = random.Random(1)
    prompts = [drawn(draw, draw.randint(1, 600)) for _ in range(count)]
    with served(model_of("llama"), "lengths", work) as one, ThreadPoolExecutor(8) as pool:
        before = one.describe()
        codes = Counter(answer.status_code for answer in pool.map(lambda prompt: one.ask(prompt, 4), prompts))
        after = one.describe()
    return {
        "requests": count, "statuses": dict(codes),
        "compiles_after_ready": after["serving"]["compiles_after_ready"],
        "recompiles": after["summary"]["recompiles"] - before["summary"]["recompiles"],
        "graphs": after["summary"]["graphs"] - before["summary"]["graphs"],
    }  # fmt: skip


def _first_token(one: Served, prompt: Tokens) -> float:
    started = time.perf_counter()
    with one.http.stream("POST", "", json=one.body(prompt, 4, stream=True)) as answer:
        next(answer.iter_text())
        return (time.perf_counter() - started) * 1e3


def first(work: Path, count: int) -> dict[str, Any]:
    """A short prompt alone, and 50 ms after a long one; medians in ms."""
    draw = random.Random(2)
    # 28 M weights: a prompt of 1,800 tokens takes seconds.
    model = model_of("llama", features=512, layers=8)
    alone, beside, long = [], [], []
    with served(model, "first", work) as one:
        _first_token(one, drawn(draw, 20))
        for _ in range(7):
            alone.append(_first_token(one, drawn(draw, 20)))
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(_first_token, one, drawn(draw, 1800))
                time.sleep(0.05)
                beside.append(_first_token(one, drawn(draw, 20)))
                long.append(other.result())
    return {
        "short_alone_ms": statistics.median(alone), "short_beside_long_ms": statistics.median(beside),
        "long_ms": statistics.median(long),
    }  # fmt: skip


def _memory(pid: int) -> float:
    """Resident memory of a process and its children, in MB."""
    process = psutil.Process(pid)
    return sum(member.memory_info().rss for member in [process, *process.children(recursive=True)]) / 1e6


class _Soak:
    """Sends one random request after the other, from several threads, and counts how they end.

    Args:
        one: Gets the requests.
        known: The right answer to each prompt.
        worker_dies: Whether the worker is killed: then answers may break off, and bad requests fail like others.
    """

    def __init__(self, one: Served, known: dict[Tokens, Tokens], *, worker_dies: bool = False) -> None:
        self.one, self.known, self.ended, self.worker_dies = one, known, Counter[str](), worker_dies
        self.killed = 0.0
        self._lock = threading.Lock()

    def send(self, number: int) -> None:
        """Sends the request of this number."""
        draw = random.Random(number)
        prompt = draw.choice(list(self.known))
        kinds: list[Callable[[Tokens, random.Random], str]] = [
            self._bad, self._bad, self._good, self._good, self._sampled, draw.choice((self._streamed, self._given_up))
        ]  # fmt: skip
        started = time.monotonic()
        try:
            ended = draw.choice(kinds)(prompt, draw)
        except httpx.HTTPError as error:
            ended = f"lost: {type(error).__name__}"
            if self.worker_dies and not isinstance(error, httpx.TimeoutException):
                ended = _BROKEN
        if ended.startswith("failed") and self.killed and started < self.killed + 60:
            ended = "broken off by the kill" if ended == _BROKEN else "5xx after the kill"
        with self._lock:
            self.ended[ended] += 1

    def _bad(self, prompt: Tokens, draw: random.Random) -> str:
        bodies: list[Any] = [
            {"prompt": ""}, {"prompt": "w5", "max_tokens": 10**6}, {"prompt": "w5", "temperature": -1}, {}, [],
            {"prompt": "w5", "unknown": 1}, b"\xff\xfe", b"{", {"prompt": "w5", "n": 0}, {"prompt": {"text": "w5"}},
        ]  # fmt: skip
        body = draw.choice(bodies)
        answer = self.one.http.post("", **({"content": body} if isinstance(body, bytes) else {"json": body}))
        if self.worker_dies and answer.status_code >= 500:
            return f"failed {answer.status_code}"
        return "refused" if 400 <= answer.status_code < 500 else f"wrong status {answer.status_code}: {body}"

    def _good(self, prompt: Tokens, draw: random.Random) -> str:
        answer = self.one.ask(prompt, _ANSWER)
        if answer.status_code != 200:
            return f"failed {answer.status_code}"
        return "right" if answer_of(answer) == self.known[prompt] else "wrong answer"

    def _sampled(self, prompt: Tokens, draw: random.Random) -> str:
        answer = self.one.ask(prompt, _ANSWER, temperature=0.8, seed=draw.randrange(100))
        return "right" if answer.status_code == 200 else f"failed {answer.status_code}"

    def _streamed(self, prompt: Tokens, draw: random.Random) -> str:
        with self.one.http.stream("POST", "", json=self.one.body(prompt, _ANSWER, stream=True)) as answer:
            text = "".join(answer.iter_text())
        if answer.status_code != 200 or "error" in text:
            return f"failed {answer.status_code}"
        return "right" if text.endswith("data: [DONE]\n\n") else "wrong stream"

    def _given_up(self, prompt: Tokens, draw: random.Random) -> str:
        with self.one.http.stream("POST", "", json=self.one.body(prompt, 200, stream=True)) as answer:
            next(answer.iter_text(), "")
        return "given up"


def _known(model: Any, draw: random.Random) -> dict[Tokens, Tokens]:
    """The answers to some prompts."""
    prompts = [drawn(draw, number % 40 + 1) for number in range(_KNOWN)]
    return {prompt: greedy(model, prompt, _ANSWER) for prompt in prompts}


def soak(work: Path, count: int) -> dict[str, Any]:
    """Random requests from 16 clients; the process that generates is killed after two thirds of them."""
    model = model_of("llama")
    known = _known(model, random.Random(3))
    with served(model, "soak", work) as one, ThreadPoolExecutor(_CLIENTS) as pool:
        run, pid = _Soak(one, known), one.describe()["pid"]
        parts = (range(count // 3), range(count // 3, 2 * count // 3), range(2 * count // 3, count))
        memory = []
        for part in parts:
            if part is parts[-1]:
                os.kill(one.describe()["generate"]["process"], signal.SIGKILL)
                run.killed = time.monotonic()
            for number, _ in enumerate(pool.map(run.send, part)):
                if number % 1000 == 999:
                    output.progress.print(f"soak: {part.start + number + 1} of {count}")
            _wait_until_idle(one)
            memory.append(_memory(pid))
        same = one.describe()["pid"] == pid
        now = one.describe()["generate"]["now"]
    return {
        "requests": count, **dict(run.ended), "memory_mb_after_each_third": memory, "same_worker": same, "now": now
    }  # fmt: skip


def kill(work: Path, count: int) -> dict[str, Any]:
    """Random requests from 16 clients; the worker is killed after each third of them, but for the last."""
    count = max(3, count // 5)
    model = model_of("llama")
    known = _known(model, random.Random(4))
    pids, waited = [], []
    with served(model, "kill", work) as one, ThreadPoolExecutor(_CLIENTS) as pool:
        run = _Soak(one, known, worker_dies=True)
        futures = [pool.submit(run.send, number) for number in range(count)]
        for third in (1, 2):
            while sum(run.ended.values()) < third * count // 3:
                time.sleep(0.01)
            pids.append(one.describe()["pid"])
            os.kill(pids[-1], signal.SIGKILL)
            run.killed = time.monotonic()
            one.server.wait_replaced("kill", pids[-1])
            waited.append(time.monotonic() - run.killed)
        for request in futures:
            request.result()
        _wait_until_idle(one)
        pids.append(one.describe()["pid"])
    return {
        "requests": count, **dict(run.ended), "workers": len(set(pids)), "seconds_until_ready": waited
    }  # fmt: skip


def _wait_until_idle(one: Served) -> None:
    for _ in range(600):
        now = one.describe()["generate"]["now"]
        if not now["running"] and not now["waiting"]:
            return
        time.sleep(0.1)


def start(work: Path, count: int) -> dict[str, Any]:
    """Seconds from the start of a process to its first token; medians of five turns."""
    return starts(work, turns=5)


def worker_start(work: Path, count: int) -> dict[str, Any]:
    """Seconds from TorchServe's order for a worker to its first token; medians of five turns."""
    return worker_starts(work, turns=5)


CHECKS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "tokens": tokens, "lengths": lengths, "first": first, "soak": soak, "kill": kill, "start": start,
    "worker_start": worker_start,
}  # fmt: skip


def main(
    only: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(CHECKS)}")] = ",".join(CHECKS),
    requests: Annotated[int, typer.Option(help="Of soak; lengths sends up to 1,000.", min=3)] = 10_000,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Checks text generation over REST."""
    warnings.filterwarnings("ignore")
    figures = {}
    for name in output.chosen(only, CHECKS, "--only"):
        with tempfile.TemporaryDirectory(prefix="tsov-bench-") as work:
            began = time.perf_counter()
            figures[name] = {**CHECKS[name](Path(work), requests), "seconds": time.perf_counter() - began}
        rows = [(key, str(value)) for key, value in figures[name].items()]
        output.results().print(output.table(name, ["figure", "value"], rows, left=2))
    output.write_json(json_path, figures)


if __name__ == "__main__":
    typer.run(main)
