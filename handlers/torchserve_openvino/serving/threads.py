"""Decides how many threads and inference streams a worker gets, so that workers do not compete for cores."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import torch

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.config.cores import allowed_cores
from torchserve_openvino.config.options import json_safe
from torchserve_openvino.errors import ConfigError

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")

THREADS_KEY = "handler.openvino.threads"
MODE_KEY = "handler.openvino.execution.mode"
STREAMS_KEY = "handler.openvino.execution.streams"
CONFIG_KEY = "pt2.compile.options.config"

_OMP = "OMP_NUM_THREADS"
_VARIABLES = (_OMP, "MKL_NUM_THREADS")
# Values that `apply` wrote: a second plan of this process must not take them for the user's.
_written: dict[str, str] = {}


# --- cores --------------------------------------------------------------------------------------------------


def usable_cores(cgroup_root: Path = CGROUP_ROOT, cgroup_membership: Path = CGROUP_MEMBERSHIP) -> int:
    """Returns the cores of this process: its CPU affinity, or fewer where a cgroup quota allows less; at least 1.

    Args:
        cgroup_root: Where cgroups (v1, v2 or both) are mounted.
        cgroup_membership: File that names this process's cgroups, as ``/proc/self/cgroup`` does.

    Returns:
        Whole cores; a quota of 2.5 cores gives 2. Files that are missing or cannot be read set no limit.
    """
    return max(1, min([allowed_cores(), *_quotas(cgroup_root, cgroup_membership)]))


def _quotas(root: Path, membership: Path) -> Iterator[int]:
    """Yields, in whole cores, every quota that applies: that of this process's cgroup and those of its parents."""
    for folder in _folders(root, membership):
        v1 = f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}"
        for text in (_text(folder / "cpu.max"), v1):
            cores = _whole_cores(text)
            if cores is not None:
                yield cores


def _folders(root: Path, membership: Path) -> Iterator[Path]:
    # v2 is mounted at the root itself, or beside v1 as "unified". A container may have its own cgroup at the mount's
    # root and the host's path in the membership, so the roots are read in any case.
    places = {(root, "/"), (root / "unified", "/"), (root / "cpu", "/")}
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            places |= {(root, path), (root / "unified", path)}
        elif "cpu" in controllers.split(","):
            places |= {(root / "cpu", path), (root / controllers, path)}
    for mount, path in places:
        parts = PurePosixPath("/", path).parts[1:]
        # "/../x" lies outside what this namespace can see; only the mount's root is known then.
        yield from (mount.joinpath(*parts[:depth]) for depth in range(1 if ".." in parts else len(parts) + 1))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").removesuffix("\n")
    except (OSError, ValueError):
        return ""


def _whole_cores(text: str) -> int | None:
    """Converts ``quota period`` in microseconds to whole cores; None for ``max``, -1 and anything malformed."""
    try:
        quota, period = map(int, text.split(" "))
    except ValueError:
        return None
    return max(1, quota // period) if quota > 0 and period > 0 else None


# --- the thread plan ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ThreadPlan:
    """Threads and streams of one worker; `plan_threads` makes it.

    Attributes:
        cores: Cores that all workers share.
        workers: Workers of the model.
        setting: ``handler.openvino.threads``.
        torch_threads: Threads of PyTorch (for what falls back to eager), and of OpenMP and MKL.
        openvino_threads: Threads of OpenVINO on the CPU; None on another device where no number is configured.
        streams: Inferences that run at once in this worker, at least 1.
        sources: Where `torch_threads`, `openvino_threads` and `streams` came from, in words.
        additions: OpenVINO properties that the user's own config leaves open.
    """

    cores: int
    workers: int
    setting: int | Literal["auto"]
    torch_threads: int
    openvino_threads: int | None
    streams: int
    sources: Mapping[str, str]
    additions: Mapping[str, int | bool]

    def apply(self) -> None:
        """Sets PyTorch's threads, and environment variables for libraries that load later and for child processes.

        A value that the user set in the environment is overwritten only by an explicit `setting`.
        """
        torch.set_num_threads(self.torch_threads)
        for name in _VARIABLES:
            if self.setting == "auto" and name in _users_environment():
                continue
            os.environ[name] = _written[name] = str(self.torch_threads)

    def settle(self) -> "ThreadPlan":
        """Gives PyTorch a single thread, once all operators run on OpenVINO; an explicit `setting` stays.

        PyTorch then only copies inputs. Split over several threads these copies take longer, because the threads spin
        for milliseconds after each, on the cores that OpenVINO needs next.
        """
        if self.setting != "auto":
            return self
        torch.set_num_threads(1)
        sources = {**self.sources, "torch_threads": "1: no operator is left to PyTorch"}
        return replace(self, torch_threads=1, sources=sources)

    def ov_config(self) -> dict[str, int | bool]:
        """Returns the properties to add to OpenVINO's config; empty on devices other than the CPU."""
        return dict(self.additions)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan, JSON-safe."""
        names = ("cores", "workers", "torch_threads", "openvino_threads", "streams", "sources")
        return {name: json_safe(getattr(self, name)) for name in names} | {"ov_config": self.ov_config()}


class _Number(NamedTuple):
    value: int
    source: str
    key: str


def plan_for(config: ServingConfig, running: int, workers: int | None = None) -> ThreadPlan:
    """Plans the threads of one worker of a model; see `plan_threads`.

    Args:
        config: The model's settings.
        running: Workers of the model that run by now.
        workers: Workers that the host starts; None if it does not say, so that the YAML counts.
    """
    keys, section, backend = config.torchserve, config.openvino, config.backend
    return plan_threads(
        section.threads,
        # More workers may run than the YAML says: by TorchServe's default, or when scaled at run time.
        workers=workers or max(int(keys.get("maxWorkers", keys.get("minWorkers", 1))), running),
        streams=section.execution.streams,
        throughput=section.execution.mode == "throughput",
        ov_config=backend.options.config if backend is not None else {},
        device=backend.options.device if backend is not None else "CPU",
    )


def plan_threads(
    setting: int | Literal["auto"],
    *,
    workers: int,
    streams: int | Literal["auto"],
    throughput: bool,
    ov_config: Mapping[str, Any],
    device: str,
    cores: int | None = None,
    env: Mapping[str, str] | None = None,
) -> ThreadPlan:
    """Decides threads and streams of one worker; explicit numbers win over computed ones.

    In order of precedence, threads come from ``INFERENCE_NUM_THREADS`` of `ov_config` (for PyTorch, an explicit
    `setting` comes before it), `setting`, ``OMP_NUM_THREADS``, and the worker's share of the cores. Streams come from
    ``NUM_STREAMS`` of `ov_config`, `streams`, and the mode: 1 for latency; for throughput on the CPU one per thread for
    up to 4 threads, above that a quarter of the threads, at least 2.

    Args:
        setting: ``handler.openvino.threads``.
        workers: ``maxWorkers``, or the number that run.
        streams: ``handler.openvino.execution.streams``.
        throughput: Whether ``handler.openvino.execution.mode`` is throughput.
        ov_config: OpenVINO properties that the user set, already validated.
        device: OpenVINO's name of the device, e.g. ``CPU``, ``AUTO:GPU,CPU``.
        cores: Cores that the workers share; `usable_cores` if None.
        env: Environment variables; those of this process if None.

    Raises:
        ConfigError: More streams than OpenVINO has threads, throughput with a single stream, or latency with several.
    """
    cores = max(1, usable_cores() if cores is None else cores)
    workers = max(1, workers)
    device = device.upper()
    stated = _stated(ov_config, device)
    share = _share(setting, _users_environment() if env is None else env, cores, workers)
    own = _inference_threads(stated, cores)
    for_torch = own if own is not None and setting == "auto" else share
    for_openvino = own or (share if device == "CPU" else None)
    parts = _streams(streams, throughput, stated, for_openvino, device)
    additions: dict[str, int | bool] = {}
    if device == "CPU" and for_openvino is not None:
        _check_enough(parts, for_openvino)
        additions = {"INFERENCE_NUM_THREADS": for_openvino.value}
        if parts.value > 1:
            additions["NUM_STREAMS"] = parts.value
        if workers > 1:
            # OpenVINO pins each process's threads to the first cores it finds: two workers would share one core
            # (measured on 2026.4: 36 inferences a second each when pinned, 73 when not).
            additions["ENABLE_CPU_PINNING"] = False
    return ThreadPlan(
        cores=cores,
        workers=workers,
        setting=setting,
        torch_threads=for_torch.value,
        openvino_threads=for_openvino.value if for_openvino else None,
        streams=parts.value,
        sources={
            "torch_threads": for_torch.source,
            "openvino_threads": for_openvino.source if for_openvino else f"left to {device}",
            "streams": parts.source,
        },
        additions={name: value for name, value in additions.items() if name not in stated},
    )


def _stated(ov_config: Mapping[str, Any], device: str) -> dict[str, tuple[Any, str]]:
    """Returns the user's properties with their keys; those in ``DEVICE_PROPERTIES`` win (measured on 2026.4)."""
    nested = (ov_config.get("DEVICE_PROPERTIES") or {}).get(device) or {}
    own = {name: (value, f"{CONFIG_KEY}.{name}") for name, value in ov_config.items()}
    return own | {name: (value, f"{CONFIG_KEY}.DEVICE_PROPERTIES.{device}.{name}") for name, value in nested.items()}


def _integer(value: Any) -> int | None:
    """Returns an int or a string of digits as an int; None for AUTO, NUMA and the like."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value if isinstance(value, int) else None


def _users_environment() -> dict[str, str]:
    """Returns the thread variables of this process's environment that are not empty and that `apply` did not write."""
    values = {name: os.environ.get(name, "").strip() for name in _VARIABLES}
    return {name: value for name, value in values.items() if value and _written.get(name) != value}


def _share(setting: int | Literal["auto"], env: Mapping[str, str], cores: int, workers: int) -> _Number:
    if setting != "auto":
        return _Number(setting, f"{THREADS_KEY}: {setting}", THREADS_KEY)
    # OpenMP also takes a list, one number for each level of nesting; that says nothing about a worker's share.
    stated = _integer(env.get(_OMP))
    if stated:
        return _Number(stated, f"env {_OMP}: {stated}", _OMP)
    source = f"{THREADS_KEY}: auto: {_counted(cores, 'core')} / {_counted(workers, 'worker')}"
    return _Number(max(1, cores // workers), source, THREADS_KEY)


def _inference_threads(stated: Mapping[str, tuple[Any, str]], cores: int) -> _Number | None:
    value, key = stated.get("INFERENCE_NUM_THREADS", (None, ""))
    number = _integer(value)
    if number is None or number < 0:
        return None
    # 0 is OpenVINO's own default: all cores.
    return _Number(number, f"{key}: {number}", key) if number else _Number(cores, f"{key}: 0 (all cores)", key)


def _streams(
    streams: int | Literal["auto"],
    throughput: bool,
    stated: Mapping[str, tuple[Any, str]],
    threads: _Number | None,
    device: str,
) -> _Number:
    num_streams, key = stated.get("NUM_STREAMS", (None, ""))
    number = _integer(num_streams)
    for value, name in ((number, key), (streams, STREAMS_KEY)):
        if throughput and value in {0, 1}:
            raise ConfigError(
                f"is {value}, but {MODE_KEY}: throughput needs at least 2 streams. Remove {name} or set it "
                f"to 2 or more, or set {MODE_KEY}: latency.",
                key=name,
            )
    if not throughput and streams != "auto" and streams > 1:
        raise ConfigError(
            f"is {streams}, but {MODE_KEY}: latency gives each batch all threads; streams belong to throughput. "
            f"Set {MODE_KEY}: throughput, or remove {STREAMS_KEY}.",
            key=STREAMS_KEY,
        )
    if number is not None and number > 0:
        beaten = f" (before {STREAMS_KEY}: {streams})" if streams not in {"auto", number} else ""
        return _Number(number, f"{key}: {number}{beaten}", key)
    if streams != "auto":
        return _Number(streams, f"{STREAMS_KEY}: {streams}", STREAMS_KEY)
    if not throughput:
        return _Number(1, f"{MODE_KEY}: latency", MODE_KEY)
    if device != "CPU" or threads is None:
        return _Number(1, f"{STREAMS_KEY}: auto: 1 on {device}", STREAMS_KEY)
    auto = automatic_streams(threads.value)
    return _Number(auto, f"{STREAMS_KEY}: auto: {auto} for {_counted(threads.value, 'thread')}", STREAMS_KEY)


def automatic_streams(threads: int) -> int:
    """Returns how many inferences run at once on the threads of a worker in throughput mode."""
    return threads if threads <= 4 else max(2, threads // 4)


def _check_enough(streams: _Number, threads: _Number) -> None:
    """Refuses more streams than threads, which OpenVINO would silently reduce (measured on 2026.4)."""
    if streams.value > threads.value:
        raise ConfigError(
            f"asks for {streams.value} streams, but OpenVINO has {_counted(threads.value, 'thread')} "
            f"({threads.source}), and a stream needs at least one. Set {streams.key} to at most {threads.value}, "
            f"or {threads.key} to at least {streams.value}.",
            key=streams.key,
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
