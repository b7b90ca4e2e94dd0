"""The load client: a process of its own, so that it shares no interpreter with the server or with who measures.

It reads one `Plan` as a line of JSON, writes ``ready``, waits for a line, sends, and writes one `LoadOutcome` as JSON.
"""

import asyncio
import json
import math
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

# The event loop's timers are late by up to a millisecond; more means that the client itself is too slow.
_EXAMPLES = 3


@dataclass(frozen=True)
class Plan:
    """What to send.

    Attributes:
        url: Where to send, by POST.
        bodies: File and content type of each request; sent in turn, in an order drawn from the seed.
        rate: Requests/s, as a Poisson process, whatever the server does; 0 for a closed loop.
        clients: Of a closed loop: each sends its next request once it has an answer.
        seconds: How long requests are counted.
        settle: Seconds of the same load before that.
        seed: Of arrivals and bodies: equal seeds send equal requests at equal times.
        outstanding: Most requests without an answer; further ones are counted as dropped, which is a failure.
        timeout: Seconds after which a request has failed.
        streamed: Whether the time to the first bytes of the answer is measured as well.
    """

    url: str
    bodies: list[tuple[str, str]]
    rate: float
    seconds: float
    clients: int = 1
    settle: float = 0.0
    seed: int = 0
    outstanding: int = 512
    timeout: float = 30.0
    streamed: bool = False


@dataclass
class LoadOutcome:
    """What happened to the requests that were due in the counted time.

    Attributes:
        due: When each request was due, in seconds from the begin of the counted time.
        latencies: Milliseconds from then until the last byte of the answer; NaN for requests that failed.
        first_bytes: Milliseconds until the first byte, NaN for requests that failed; empty unless `Plan.streamed`.
        failures: How often each failure happened: a status, an exception's name, or ``dropped``.
        examples: The first few failures, with the server's words.
        delays: Milliseconds by which the client sent later than due.
        cpu_seconds: Processor time of the client in the counted time.
    """

    due: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0


def broken_off(stream: bytes) -> str:
    """Returns the event with which a stream of events broke off; empty if it did not.

    It has the form of its endpoint: OpenAI's ``error``, the plain ``code`` and ``message``, or a type of error.
    """
    events = [line.removeprefix(b"data:").strip() for line in stream.splitlines() if line.startswith(b"data:")]
    last = next((event for event in reversed(events) if event != b"[DONE]"), b"")
    try:
        content = json.loads(last)
    except ValueError:
        # Other streams have texts.
        return "the last event is cut off" if last.startswith(b"{") else ""
    if not isinstance(content, dict):
        return ""
    fails = content.get("error") or {"code", "message"} <= content.keys() or str(content.get("type")).endswith("error")
    return last.decode(errors="replace") if fails else ""


class LoadRun:
    """One plan that is carried out.

    Args:
        plan: What to send.
        session: Sends it.
    """

    def __init__(self, plan: Plan, session: aiohttp.ClientSession) -> None:
        self.plan, self.outcome = plan, LoadOutcome()
        self._session = session
        self._bodies = [(Path(path).read_bytes(), kind) for path, kind in plan.bodies]
        self._arrivals = random.Random(plan.seed)
        self._choices = random.Random(f"{plan.seed} bodies")
        self._pending: set[asyncio.Task[None]] = set()
        self._begin = 0.0

    async def run(self) -> None:
        """Returns when each request has its answer or has failed."""
        start = time.perf_counter()
        self._begin = start + self.plan.settle
        before = asyncio.get_running_loop().call_at(
            asyncio.get_running_loop().time() + self.plan.settle, self._note_cpu, -1
        )
        await (self._open(start) if self.plan.rate else self._closed())
        before.cancel()
        self._note_cpu(1)

    def _note_cpu(self, sign: int) -> None:
        self.outcome.cpu_seconds += sign * time.process_time()

    async def _closed(self) -> None:
        async def client() -> None:
            while (now := time.perf_counter()) < self._begin + self.plan.seconds:
                await self._send(now, self._choices.choice(self._bodies))

        await asyncio.gather(*(client() for _ in range(self.plan.clients)))

    async def _open(self, due: float) -> None:
        while (due := due + self._arrivals.expovariate(self.plan.rate)) < self._begin + self.plan.seconds:
            # Drawn for dropped requests too: equal seeds send equal requests.
            body = self._choices.choice(self._bodies)
            # A late loop sends at once; the latency counts from `due`, so that nothing is hidden.
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if len(self._pending) >= self.plan.outstanding:
                self._fail(due, "dropped", "too many without an answer")
                continue
            task = asyncio.create_task(self._send(due, body))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)
        if self._pending:
            await asyncio.gather(*self._pending)

    async def _send(self, due: float, body: tuple[bytes, str]) -> None:
        data, kind = body
        sent = time.perf_counter()
        first = None
        try:
            async with self._session.post(self.plan.url, data=data, headers={"content-type": kind}) as response:
                begin = b""
                if self.plan.streamed:
                    begin = await response.content.readany()
                    first = time.perf_counter()
                answer = begin + await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            self._fail(due, type(error).__name__, str(error))
            # Avoids a busy loop while connections are refused.
            await asyncio.sleep(0.01)
            return
        done = time.perf_counter()
        if response.status != 200:
            self._fail(due, str(response.status), answer[:200].decode(errors="replace"))
        elif response.content_type == "text/event-stream" and (event := broken_off(answer)):
            # A stream that fails has sent its status before.
            self._fail(due, "stream", event[:200])
        elif due >= self._begin:
            self._count(due, (done - due) * 1e3, math.nan if first is None else (first - due) * 1e3)
            self.outcome.delays.append((sent - due) * 1e3)

    def _fail(self, due: float, kind: str, text: str) -> None:
        if due < self._begin:
            return
        self.outcome.failures[kind] = self.outcome.failures.get(kind, 0) + 1
        if len(self.outcome.examples) < _EXAMPLES:
            self.outcome.examples.append(f"{kind}: {text}")
        self._count(due, math.nan, math.nan)

    def _count(self, due: float, latency: float, first_byte: float) -> None:
        self.outcome.due.append(due - self._begin)
        self.outcome.latencies.append(latency)
        if self.plan.streamed:
            self.outcome.first_bytes.append(first_byte)


async def carry_out(plan: Plan) -> dict[str, Any]:
    """Carries out a plan once a line comes on stdin; returns an `LoadOutcome` as a JSON-safe dictionary."""
    timeout = aiohttp.ClientTimeout(total=plan.timeout)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        load = LoadRun(plan, session)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await load.run()
    return asdict(load.outcome)


def main() -> None:
    """Runs the client; `window.py` is the other end."""
    # Ctrl-C reaches the whole terminal group; the other end stops this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fields = json.loads(sys.stdin.readline())
    plan = Plan(**{**fields, "bodies": [(path, kind) for path, kind in fields["bodies"]]})
    print(json.dumps(asyncio.run(carry_out(plan))), flush=True)


if __name__ == "__main__":
    main()
