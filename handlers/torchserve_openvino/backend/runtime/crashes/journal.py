"""Remembers, from one process to the next, what OpenVINO was compiling when a process ended.

While a process compiles a partition, it holds the lock of a small file, the marker. The operating system releases the
lock when the process ends, however it ends: a marker without a lock belongs to a process that died. Unlike a process
id, a lock can't be taken over by another process, and it holds across containers that share the folder.

Nothing is synced to disk. What a process has written outlives the process; only a power cut loses it, and after a power
cut (or on another machine) a marker is no evidence: it names another boot, and is removed.
"""

import contextlib
import functools
import json
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import openvino as ov
import torch
from blake3 import blake3

from torchserve_openvino.cache.identity.key import digest
from torchserve_openvino.config.cores import allowed_cores
from torchserve_openvino.files.atomic import AtomicFile, write_atomically
from torchserve_openvino.files.json_text import parse_json

# --- describes what is compiled, so that a later process recognizes it --------------------------------------------


# Operators in a description.
_SHOWN = 8
# Properties on which no kernel depends.
_ELSEWHERE = frozenset({"CACHE_DIR", "LOG_LEVEL"})


@dataclass(frozen=True)
class Subject:
    """A model that is compiled.

    Attributes:
        identity: Digest of the model's structure, device, configuration, versions and hardware.
        name: Where the report shows it, such as ``graph 0 / openvino_0``.
        operators: Types of its operators, with counts.
    """

    identity: str
    name: str
    operators: Mapping[str, int] = field(default_factory=dict)

    @property
    def described(self) -> str:
        """Its name and most frequent operators, on one line."""
        most = sorted(self.operators.items(), key=lambda item: (-item[1], item[0]))
        names = ", ".join(f"{count}x {kind}" for kind, count in most[:_SHOWN])
        more = " and others" if len(most) > _SHOWN else ""
        return f"{self.name} ({names}{more})" if names else self.name


def subject_of_model(
    model: ov.Model, name: str, device: str, config: Mapping[str, Any], hardware: Mapping[str, Any]
) -> Subject:
    """Describes a model; takes 10 to 20 us for each of its operators.

    The compiler chooses kernels by operators, types and sizes, so the values of weights are no part of it. Types and
    sizes follow from those of inputs and weights.
    """
    operators = Counter[str]()
    structure = blake3("\n".join(_structure(model, operators)).encode()).hexdigest()
    for plain in ("Constant", "Parameter", "Result"):
        del operators[plain]
    return Subject(_identity(structure, device, config, hardware), name, dict(operators))


def subject_of_blob(
    content: str, name: str, device: str, config: Mapping[str, Any], hardware: Mapping[str, Any]
) -> Subject:
    """Describes a compiled model by the digest of its content."""
    return Subject(_identity(f"blob {content}", device, config, hardware), name)


def _structure(model: ov.Model, operators: Counter[str]) -> Iterator[str]:
    position: dict[str, int] = {}
    for number, node in enumerate(model.get_ordered_ops()):
        kind = node.get_type_name()
        operators[kind] += 1
        position[node.get_name()] = number
        sources = [(position[value.get_node().get_name()], value.get_index()) for value in node.input_values()]
        # The attributes of inputs and weights are their types and sizes.
        yield f"{kind} {sources} {node.get_attributes()}"


def _identity(structure: str, device: str, config: Mapping[str, Any], hardware: Mapping[str, Any]) -> str:
    return digest({
        "structure": structure,
        "device": device,
        "config": {name: str(value) for name, value in config.items() if name not in _ELSEWHERE},
        "hardware": hardware,
        # By default as many threads, on which kernels depend.
        "cores": allowed_cores(),
        "openvino": ov.__version__,
        "torch": torch.__version__,
    })[:32]  # fmt: skip


# --- remembers, from one process to the next, what OpenVINO was compiling when a process ended --------------------


try:
    import fcntl
except ImportError:  # Windows, where no marker is written.
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

# How a partition is compiled: as always, without fusion (`fused_chains.NO_FUSION`), or not at all. `trial`: a process
# waits for another one that compiles.
Mode = Literal["normal", "unfused", "eager", "trial"]

# Without a signal, a process may have been killed from outside: such a verdict must not hold for good.
UNCERTAIN_SECONDS = 24 * 3600.0
_KEPT_SECONDS = 90 * 24 * 3600.0
_DRAFT_SECONDS = 3600.0
_KEPT_FILES = 1000
_MAX_BYTES = 1 << 16
_MARKER, _VERDICT, _DRAFT = ".marker", ".verdict", ".tmp"
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
# Distinguishes this process from an earlier one with the same id, which is common in containers.
_PROCESS = secrets.token_hex(8)


@dataclass(frozen=True)
class Death:
    """The marker of a process that ended while it compiled.

    Attributes:
        path: The marker.
        pid: The process.
        mode: How it compiled.
    """

    path: Path
    pid: int
    mode: Mode


@dataclass(frozen=True)
class CompileAdvice:
    """How to compile a partition at which processes died.

    Attributes:
        mode: How to compile it.
        signal: Name of the signal that ended the process, such as ``SIGFPE``; empty if it is not known.
        time: Seconds since the epoch.
        deaths: How many processes died; 0 if it was only tried, because they died at another partition.
    """

    mode: Mode
    signal: str = ""
    time: float = 0.0
    deaths: int = 1


class Journal:
    """Markers and verdicts in a folder; a failure of the folder is logged once and never raised.

    Args:
        folder: A folder that only this user can write to.
        alarmed: The attribute's value at first.

    Attributes:
        alarmed: Whether the compiler dies at a partition of this model. What kills it is likely to be in others too (in
            each batch size, for example), which are therefore tried before each costs a worker its life.
    """

    def __init__(self, folder: Path, alarmed: bool = False) -> None:
        self.folder = folder
        self.alarmed = alarmed
        self._failed = False
        self._tidy()

    @contextlib.contextmanager
    def compiling(self, subject: Subject, mode: Mode) -> Iterator[None]:
        """Keeps a marker for the duration of the ``with``."""
        marker = self._mark(subject, mode)
        try:
            yield
        finally:
            if marker is not None:
                path, file = marker
                # In this order, so that nobody sees the marker without its lock.
                with contextlib.suppress(OSError):
                    path.unlink()
                file.close()

    def deaths(self, identity: str) -> list[Death]:
        """Returns the markers of processes that died while they compiled this."""
        own = f".{os.getpid()}-{_PROCESS}."
        names = [name for name in self._names() if name.startswith(f"{identity}.") and name.endswith(_MARKER)]
        # To open and close a marker of this process would release its lock.
        paths = [self.folder / name for name in names if own not in name]
        return [death for path in paths if (death := _death(path)) is not None]

    def verdict(self, identity: str) -> CompileAdvice | None:
        """Returns how to compile this; None if nothing is known, or no longer certain."""
        try:
            verdict = CompileAdvice(**_read(self.verdict_file(identity))["verdict"])
            uncertain = verdict.deaths and not verdict.signal and time.time() - verdict.time > UNCERTAIN_SECONDS
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._complain(error)
            return None
        return None if uncertain or verdict.mode not in ("normal", "unfused", "eager") else verdict

    def settle(self, subject: Subject, verdict: CompileAdvice | None, deaths: list[Death]) -> None:
        """Stores a verdict, or removes it if None, and removes the markers that led to it."""
        path = self.verdict_file(subject.identity)
        try:
            if verdict is None:
                path.unlink(missing_ok=True)
            else:
                facts = {**asdict(subject), "verdict": asdict(verdict)}
                write_atomically(path, json.dumps(facts).encode(), sync=False)
            for death in deaths:
                death.path.unlink(missing_ok=True)
        except OSError as error:
            self._complain(error)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lets one process at a time look for the cause of a death; the others wait for its verdict."""
        try:
            descriptor = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o600)
        except OSError as error:
            self._complain(error)
            yield
            return
        try:
            with contextlib.suppress(OSError):
                fcntl.lockf(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def verdict_file(self, identity: str) -> Path:
        """Returns the file of a verdict."""
        return self.folder / f"{identity}{_VERDICT}"

    def _mark(self, subject: Subject, mode: Mode) -> tuple[Path, BinaryIO] | None:
        """Writes a marker, and returns its path and the open file that holds its lock; None if that fails."""
        facts = {**asdict(subject), "mode": mode, "pid": os.getpid(), "boot": _boot(), "time": time.time()}
        path = self.folder / f"{subject.identity}.{os.getpid()}-{_PROCESS}.{secrets.token_hex(4)}{_MARKER}"
        try:
            with AtomicFile(path, sync=False, suffix=_DRAFT) as draft:
                draft.file.write(json.dumps(facts).encode())
                # The lock comes first: a marker without one counts as a death.
                fcntl.lockf(draft.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.commit()
                return path, draft.keep_open()
        except OSError as error:
            self._complain(error)
            return None

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.folder)  # noqa: PTH208 (names are all that is needed)
        except OSError as error:
            self._complain(error)
            return []

    def _tidy(self) -> None:
        """Removes what is old, and the oldest of what is too much."""
        now, ages = time.time(), []
        for name in self._names():
            path = self.folder / name
            with contextlib.suppress(OSError):
                age = now - path.lstat().st_mtime
                if path.suffix in (_MARKER, _VERDICT, _DRAFT):
                    ages.append((age, path))
        ages.sort(reverse=True)
        for position, (age, path) in enumerate(ages):
            limit = _DRAFT_SECONDS if path.suffix == _DRAFT else _KEPT_SECONDS
            if age > limit or len(ages) - position > _KEPT_FILES:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _complain(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("A death while compiling may go unnoticed: %s: %s", self.folder, error)


def journal_in(folder: Path | None, alarmed: bool = False) -> Journal | None:
    """Returns a journal in a folder; None without one, or where files can't be locked."""
    return Journal(folder, alarmed) if folder is not None and fcntl is not None else None


def _death(path: Path) -> Death | None:
    """Returns the death that a marker stands for; None if its process lives, or the marker is no evidence."""
    try:
        descriptor = os.open(path, _READ)
    except OSError:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.fstat(descriptor).st_nlink:
            # Removed since it was opened: its process has finished.
            return None
        facts = parse_json(os.read(descriptor, _MAX_BYTES))
        if facts["boot"] == _boot():
            return Death(path, int(facts["pid"]), facts["mode"])
        reason = "it is from another machine, or from before its restart"
    except OSError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        reason = f"it cannot be read: {error!r}"
    finally:
        os.close(descriptor)
    logger.info("%s says nothing about a death: %s", path, reason)
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def _read(path: Path) -> dict[str, Any]:
    descriptor = os.open(path, _READ)
    try:
        facts = parse_json(os.read(descriptor, _MAX_BYTES))
    finally:
        os.close(descriptor)
    if not isinstance(facts, dict):
        raise TypeError(f"{path} holds no JSON object")
    return facts


@functools.lru_cache(maxsize=1)
def _boot() -> str:
    """Returns the id of this boot of the kernel, which containers share; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
