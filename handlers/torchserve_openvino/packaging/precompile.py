"""Compiles the model of an archive as a worker would, into a cache folder that becomes part of the archive.

A separate process loads the archive like a real worker: TorchServe's own loader, the archive's handler, warm-up,
verification. The cache that it fills is packaged.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from torchserve_openvino.cache.open import (
    FOR_LEVEL_ENV,
    JOURNAL_FOLDER,
    PACKAGED_FOLDER,
    PRECOMPILE_ENV,
    STATE_ENV,
    state_folder,
)
from torchserve_openvino.errors import PackagingError
from torchserve_openvino.packaging.archive import files_of
from torchserve_openvino.serving.loading.archive_manifest import MANIFEST
from torchserve_openvino.serving.torchserve import archive_loader

# CPU level to oneDNN's name for it, and the capability (as torch names it) that a CPU needs to compile for it.
LEVELS: dict[str, tuple[str, str]] = {
    "sse4": ("SSE41", "sse4_1"),
    "avx2": ("AVX2", "avx2"),
    "avx512": ("AVX512_CORE", "avx512_f"),
    "avx512-vnni": ("AVX512_CORE_VNNI", "avx512_vnni"),
    "avx512-bf16": ("AVX512_CORE_BF16", "avx512_bf16"),
    "amx": ("AVX512_CORE_AMX", "amx_tile"),
}
# One that the compiler ends, one that finds out why, and one more for what only shows then.
_RUNS = 3
# Stored in the archive for `--check`: digests of its own files; and the reasons why calls are traced nevertheless.
CONTENTS = "contents.json"
GUARDED = "guarded.json"


@dataclass(frozen=True)
class Precompiled:
    """Result of loading the archive once.

    Attributes:
        level: Name of the CPU level; empty for this machine's own CPU.
        report: The model's report.
    """

    level: str
    report: Mapping[str, Any]

    @property
    def summary(self) -> str:
        """One-line summary for the user."""
        cache, summary = self.report["cache"], self.report["summary"]
        cold = "" if not self.guarded else f"; starts cold: {'; '.join(self.guarded)}"
        where = f"any CPU with {self.level}" if self.level else "this CPU"
        return (
            f"{where}: {summary['graphs']} graph(s), {summary['coverage']:.0%} on OpenVINO, "
            f"{cache['stored']} entries stored, {cache['compiles']} compiled{cold}"
        )

    @property
    def guarded(self) -> list[str]:
        """Why a worker traces the model nevertheless; empty if it does not."""
        shapes = self.report["serving"]["shapes"]
        # A handler of several models may have no `self.model`; a language model has an engine, which traces nothing.
        models = [*([shapes] if "frozen" in shapes else []), *shapes.get("parts", {}).values()]
        why = (
            "calls are guarded, because a handler of your own may change the weights; if it does not, set "
            "handler.openvino.freeze: true"
        )
        reasons = [reason for model in models if not model["frozen"] for reason in (model["guarded"] or [why])]
        return list(dict.fromkeys(reasons))


def check_levels(names: Sequence[str]) -> None:
    """Checks that this CPU can compile for each level.

    Raises:
        PackagingError: It cannot, or a level does not exist.
    """
    for name in names:
        if name not in LEVELS:
            raise PackagingError(f"unknown CPU level {name!r}; valid levels: {', '.join(LEVELS)}.")
        import torch

        if not torch.cpu.get_capabilities().get(LEVELS[name][1]):
            raise PackagingError(
                f"this CPU lacks {name}, so it can't compile for it. Package on a machine that has it, or leave it "
                "out: the archive starts there from the stored IR, without tracing."
            )


def precompile(folder: Path, levels: Sequence[str], log: Callable[[str], None]) -> list[Precompiled]:
    """Fills the archive's cache for this CPU and for each level.

    Args:
        folder: The unpacked archive.
        levels: Names of `LEVELS` that passed `check_levels`.
        log: Called with each line of the worker's log.

    Raises:
        PackagingError: The model does not load, or nothing was compiled.
    """
    cache = folder / PACKAGED_FOLDER
    shutil.rmtree(cache, ignore_errors=True)
    done = [_load(folder, cache, level, log) for level in ("", *levels)]
    if not done[0].report["cache"]["stored"]:
        raise PackagingError(
            "nothing was compiled while the model loaded. Declare its inputs in handler.openvino.warmup.inputs, and "
            "set the backend in pt2 to openvino."
        )
    # `environment` keeps the journal elsewhere, unless this user has no folder for it.
    for rest in ("locks", "tmp", JOURNAL_FOLDER):
        shutil.rmtree(cache / rest, ignore_errors=True)
    (cache / CONTENTS).write_text(json.dumps(contents(folder), indent=1, sort_keys=True), encoding="utf-8")
    (cache / GUARDED).write_text(json.dumps(done[0].guarded), encoding="utf-8")
    return done


def contents(folder: Path) -> dict[str, str]:
    """Returns the digest of each file of an unpacked archive, except the manifest and the packaged cache."""
    digests = {}
    for path in files_of(folder):
        name = path.relative_to(folder).as_posix()
        if name != MANIFEST and not name.startswith(f"{PACKAGED_FOLDER}/"):
            digests[name] = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    return digests


def _load(folder: Path, cache: Path, level: str, log: Callable[[str], None]) -> Precompiled:
    # Imported here: it loads OpenVINO, which who only inspects an archive does not need.
    from torchserve_openvino.backend.runtime.crashes.compile_trial import CRASHES, signal_name

    environment = {**os.environ, PRECOMPILE_ENV: str(cache)}
    if (journal := state_folder(None)) is not None:
        # Not in the archive's cache, so that the compiler dies once, not each time that the model is packaged.
        environment[STATE_ENV] = str(journal)
    if level:
        environment |= {"ONEDNN_MAX_CPU_ISA": LEVELS[level][0], FOR_LEVEL_ENV: "1"}
    for _ in range(_RUNS):
        code, report, last = _run(folder, environment, log)
        if (died := signal_name(code)) not in CRASHES:
            break
        log(f"the process was ended by {died}; the model is loaded again, to find out where")
    if code or report is None:
        how = f"{died}, again and again" if died in CRASHES else f"exit code {code}"
        output = "\n".join(last)
        raise PackagingError(f"the archive does not load ({how}):\n{output}")
    if reasons := [fallback["reason"] for fallback in report["fallbacks"] if fallback["kind"] == "compile_died"]:
        lines = "\n".join(f"  - {reason}" for reason in reasons)
        raise PackagingError(
            f"OpenVINO's compiler does not survive this model:\n{lines}\nChange what the compiler gets "
            "(INFERENCE_PRECISION_HINT, threads, or disabled_ops: `torchserve-openvino doctor --bisect` finds the "
            "operators), or package without --precompile: a worker dies once, and then runs this part in eager PyTorch."
        )
    return Precompiled(level, report)


def _run(
    folder: Path, environment: Mapping[str, str], log: Callable[[str], None]
) -> tuple[int, dict[str, Any] | None, list[str]]:
    """Loads the archive in a process; returns its exit code, its report, and the last lines of its log."""
    command = [sys.executable, "-W", "ignore", "-m", archive_loader.__name__, str(folder)]
    report = None
    last: list[str] = []
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(archive_loader.RESULT):
                report = json.loads(line.removeprefix(archive_loader.RESULT))
                continue
            last = [*last[-20:], line.rstrip()]
            log(line.rstrip())
    return process.returncode, report, last
