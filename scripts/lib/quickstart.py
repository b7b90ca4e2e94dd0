"""The second half of scripts/quickstart.sh: archive, server, photo, report, and stopping what was started."""

from __future__ import annotations

import argparse
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "lib")]

from serve_server import ServeServer  # noqa: E402
from server import Ports, TorchServeError, TorchServeProcess, is_recorded_alive, stop_recorded  # noqa: E402

from build_efficientnet_mar import DEFAULT_NAME as MODEL  # noqa: E402
from build_efficientnet_mar import program  # noqa: E402


class Progress:
    """Numbered steps with their durations; a terminal shows the seconds of the running step."""

    def __init__(self, step: int, steps: int) -> None:
        self.step, self.steps = step, steps
        self._title, self._started = "", 0.0

    @contextmanager
    def __call__(self, title: str) -> Iterator[None]:
        self.step += 1
        self._title, self._started = f"[{self.step}/{self.steps}] {title}", time.monotonic()
        print(self._title, end="", flush=True)
        try:
            yield
        except BaseException:
            print(f"{self._again()} ... FAILED after {self._seconds():.1f} s", flush=True)
            raise
        print(f"{self._again()} ... done in {self._seconds():.1f} s", flush=True)

    def tick(self) -> None:
        if sys.stdout.isatty():
            print(f"{self._again()} ... {self._seconds():.0f} s ", end="", flush=True)

    def _again(self) -> str:
        return f"\r{self._title}" if sys.stdout.isatty() else ""

    def _seconds(self) -> float:
        return time.monotonic() - self._started


def cat_photo() -> bytes:
    """scikit-image's picture of the cat Chelsea, as a PNG."""
    from PIL import Image
    from skimage import data

    buffer = io.BytesIO()
    Image.fromarray(data.chelsea()).save(buffer, format="PNG")
    return buffer.getvalue()


def answer_lines(answer: dict[str, float]) -> Iterator[str]:
    """The classes with their probabilities, the most probable first."""
    for name, probability in sorted(answer.items(), key=lambda item: -item[1]):
        yield f"  {probability:7.2%}  {name}"


def classify(server: TorchServeProcess | ServeServer, photo: bytes) -> dict[str, float]:
    response = server.predict(MODEL, photo, "image/png")
    if response.status_code != httpx.codes.OK:
        raise TorchServeError(f"The request failed with {response.status_code}: {response.text}\n{server.log_tail()}")
    return dict(response.json())


def print_report(server: TorchServeProcess | ServeServer) -> None:
    url = f"{server.management_url}/models/{MODEL}"
    print(f"\nThe compile report (torchserve-openvino report {url}):\n", flush=True)
    subprocess.run([program("torchserve-openvino"), "report", url], check=True)


def run(work: Path, ports: Ports, progress: Progress, keep: bool, java: bool) -> None:
    with progress("Archive of EfficientNet-Lite0 by torch-model-archiver"):
        builder = str(SCRIPTS / "build_efficientnet_mar.py")
        command = [sys.executable, builder, "--export-path", str(work / "model-store")]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise TorchServeError(f"the archive could not be built:\n{done.stdout}{done.stderr}")
    photo = cat_photo()
    (work / "chelsea.png").write_bytes(photo)

    server: TorchServeProcess | ServeServer
    if java:
        name, server = "TorchServe", TorchServeProcess(work / "model-store", ports, models={MODEL: f"{MODEL}.mar"})
    else:
        name, server = "`serve`", ServeServer(work / "model-store" / f"{MODEL}.mar", ports.inference, work)
    kept = False
    try:
        with progress(f"{name} with the model compiled, on {server.inference_url}"):
            server.start()
            server.wait_healthy(tick=progress.tick)
            server.wait_ready(MODEL, tick=progress.tick)
        started = time.monotonic()
        answer = classify(server, photo)
        milliseconds = (time.monotonic() - started) * 1000
        best = max(answer, key=lambda name: answer[name])
        print(f"\nThe photo is: {best}, with probability {answer[best]:.4f} ({milliseconds:.0f} ms)\n")
        print(*answer_lines(answer), sep="\n")
        print_report(server)
        if keep:
            (work / "server.json").write_text(json.dumps(server.record()))
            kept = True
    finally:
        if not kept:
            # A second Ctrl-C must not leave half of the server running.
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(signum, signal.SIG_IGN)
            server.stop()
    if kept:
        print(
            f"\nThe server runs on (logs in {server.logs}). Try\n"
            f"  curl -T {work / 'chelsea.png'} {server.inference_url}/predictions/{MODEL}\n"
            f"  curl {server.metrics_url}\nand stop it with\n  scripts/quickstart.sh --stop"
        )
    else:
        print("\nThe server is stopped. `scripts/quickstart.sh --keep` leaves it running.")


def is_kept(work: Path) -> bool:
    """Whether the server of an earlier --keep still runs."""
    record = work / "server.json"
    return record.exists() and is_recorded_alive(json.loads(record.read_text()))


def stop_kept(work: Path) -> int:
    record = work / "server.json"
    stopped = stop_recorded(json.loads(record.read_text()))
    record.unlink()
    print("The server is stopped." if stopped else "The server was not running any more.")
    return 0


def on_signal(signum: int, _: FrameType | None) -> None:
    """Exits through the `finally` that stops the server."""
    raise SystemExit(128 + signum)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--ports", default="8080,8081,8082")
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--no-java", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--stop", action="store_true")
    arguments = parser.parse_args()
    if arguments.stop:
        return stop_kept(arguments.work)
    if arguments.keep and is_kept(arguments.work):
        # Its record would be overwritten, and --stop could not find it any more.
        print("error: an earlier --keep left a server running; first: scripts/quickstart.sh --stop", file=sys.stderr)
        return 1
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, on_signal)
    ports = Ports.rest(*(int(port) for port in arguments.ports.split(",")))
    try:
        run(arguments.work, ports, Progress(arguments.step, arguments.steps), arguments.keep, not arguments.no_java)
    except (TorchServeError, subprocess.CalledProcessError, httpx.HTTPError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except SystemExit:
        print("\nInterrupted; the server, if it was started, is stopped.", file=sys.stderr)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
