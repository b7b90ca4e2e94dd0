"""The load client: a program of its own, so that it shares no interpreter with a server.

Reads an order as one JSON line; writes `ready`; waits for a line; sends; writes the figures as one JSON line.
`load.py` is the other end.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.harness import percentile
from benchmarks.servers.photos import top

TIMEOUT = 60.0
KINDS = ("closed", "open")


@dataclass(frozen=True)
class Order:
    """What to send.

    Attributes:
        url: Where to send.
        photos: File and expected label of each; sent in turn.
        kind: `closed`: `level` clients, each of which sends its next request once it has an answer. `open`: `level`
            requests a second, as a Poisson process, whatever the server does.
        seconds: How long requests are counted.
        settle: Seconds of the same load before that.
        seed: Of the arrivals: the same ones for every contender.
        cap: Limit of outstanding requests in the open loop; arrivals above it are dropped.
        content_type: Of the requests.
    """

    url: str
    photos: list[tuple[str, str]]
    kind: str
    level: float
    seconds: float
    settle: float
    seed: int = 0
    cap: int = 256
    content_type: str = "image/jpeg"


@dataclass
class Tally:
    """The outcome. Latencies, in ms, are of right answers to requests that began (or were due) in the counted time.

    Attributes:
        answered: Requests that got any answer or error, including those while settling.
        right: Right answers that arrived in the counted time.
        latencies: Empty in the JSON, which has the percentiles.
    """

    answered: int = 0
    right: int = 0
    wrong: int = 0
    dropped: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def note(self, kind: str, text: str) -> None:
        """Counts a failure; keeps the first few as examples."""
        self.failed[kind] = self.failed.get(kind, 0) + 1
        self._example(f"{kind}: {text[:200]}")

    def note_wrong(self, text: str) -> None:
        """Counts an answer with another class."""
        self.wrong += 1
        self._example(text)

    def _example(self, text: str) -> None:
        if len(self.examples) < 3:
            self.examples.append(text)


class Load:
    """One order being carried out."""

    def __init__(self, order: Order, session: aiohttp.ClientSession) -> None:
        self.order, self.session, self.tally = order, session, Tally()
        self.photos = [(Path(path).read_bytes(), label) for path, label in order.photos]
        self.turn = 0
        self.begin = time.perf_counter() + order.settle
        self.end = self.begin + order.seconds

    async def run(self) -> None:
        """Returns when every request has its answer."""
        await (self._closed() if self.order.kind == "closed" else self._open())

    async def _closed(self) -> None:
        async def client() -> None:
            while (now := time.perf_counter()) < self.end:
                await self._send(now)

        await asyncio.gather(*(client() for _ in range(int(self.order.level))))

    async def _open(self) -> None:
        arrivals = random.Random(self.order.seed)
        pending: set[asyncio.Task[None]] = set()
        due = self.begin - self.order.settle
        while (due := due + arrivals.expovariate(self.order.level)) < self.end:
            # A late loop sends at once: the latency counts from `due`, so nothing is hidden.
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if len(pending) >= self.order.cap:
                self.tally.dropped += due >= self.begin
                continue
            task = asyncio.create_task(self._send(due))
            pending.add(task)
            task.add_done_callback(pending.discard)
        if pending:
            await asyncio.gather(*pending)

    async def _send(self, start: float) -> None:
        data, label = self.photos[self.turn % len(self.photos)]
        self.turn += 1
        tally = self.tally
        try:
            headers = {"content-type": self.order.content_type}
            async with self.session.post(self.order.url, data=data, headers=headers) as response:
                body = await response.read()
        # In Python 3.10 asyncio's TimeoutError is not the builtin one.
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            tally.answered += 1
            tally.note(type(error).__name__, str(error))
            # Avoids a busy loop while connections are refused.
            await asyncio.sleep(0.01)
            return
        done = time.perf_counter()
        tally.answered += 1
        if response.status != 200:
            tally.note(f"HTTP {response.status}", body.decode(errors="replace"))
        elif (best := top(body)) != label:
            tally.note_wrong(f"{best} instead of {label}")
        else:
            tally.right += self.begin <= done < self.end
            if start >= self.begin:
                tally.latencies.append((done - start) * 1e3)


async def carry_out(order: Order, go: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
    """Runs one order after `go` has returned; returns JSON-safe figures."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        await go()
        before = time.process_time()
        load = Load(order, session)
        await load.run()
        tally = load.tally
    ordered = sorted(tally.latencies)
    tally.latencies = []
    return {
        **asdict(tally),
        "counted": len(ordered),
        "rate": tally.right / order.seconds,
        **{f"p{percent}": percentile(ordered, percent / 100) if ordered else None for percent in (50, 90, 99)},
        "client_cpu_seconds": time.process_time() - before,
    }


def main() -> None:
    """The other end of load.py."""
    # Ctrl-C reaches the whole terminal group; load.py ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = Order(**json.loads(sys.stdin.readline()))

    async def go() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    print(json.dumps(asyncio.run(carry_out(order, go))), flush=True)


if __name__ == "__main__":
    main()
