"""What a user wants to have tuned, from the command line or a YAML file."""

import math
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from torchserve_openvino.bench.window import Limit
from torchserve_openvino.errors import ConfigError

Goal = Literal["throughput", "latency", "cost"]
_TIMES = {"ms": 1.0, "s": 1e3, "": 1.0}
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class Settings(BaseModel):
    """Limits, goal and effort.

    `goal` says what is better: `throughput`, the highest rate within the limits; `latency`, the lowest p99 at `rate`;
    `cost`, the highest rate for each core that is used.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    goal: Goal = "throughput"
    """What is better."""
    p99: float | None = None
    """Limit of the 99th percentile of the latency, in ms."""
    ttft: float | None = None
    """Limit of the time to the first bytes of streamed answers, in ms."""
    rate: float | None = None
    """Requests/s that have to be served; needed for the goal `latency`."""
    memory: int | None = None
    """Most bytes of the server, all its processes together."""
    cores: int | None = None
    """Cores to use; by default those of this process."""
    minutes: float = 10.0
    """About how long to measure."""
    trials: int = 20
    """Most starts of a real server."""
    window: float = 4.0
    """Seconds of each load."""
    precisions: list[Literal["f32", "bf16x3", "bf16", "f16"]] | None = None
    """Precisions to try, of which the CPU's own are taken; by default f32, bf16x3 and bf16."""
    batch_sizes: list[int] | None = None
    """Values of batchSize to try."""
    delays: list[int] | None = None
    """Values of maxBatchDelay to try, in ms."""
    workers: list[int] | None = None
    """Numbers of workers to try."""
    options: dict[str, list[Any]] | None = None
    """Values of any other key of the YAML to try, such as `{image.fold: [true], batching.dims.length: [[32, 128]]}`:
    keys relative to `handler.openvino`, or from the top (`pt2...`). By default what may help the archive's task."""
    length_counts: list[int] | None = None
    """Numbers of compiled lengths to try, which are chosen so that the requests need little padding; `[]` for none. By
    default 4 and 8, unless `options` are named."""
    seed: int = 0
    """Of arrivals and orders."""

    @field_validator("p99", "ttft", mode="before")
    @classmethod
    def _milliseconds(cls, value: Any) -> Any:
        return _quantity(value, _TIMES, "a time such as 50ms or 0.3s")

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        size = _quantity(value, _SIZES, "a size such as 2GB or 800MiB", unit="b")
        return int(size) if isinstance(size, float) else size

    @field_validator("p99", "ttft", "rate", "minutes", "window")
    @classmethod
    def _positive(cls, value: float | None) -> float | None:
        if value is not None and not (0 < value < math.inf):
            raise ValueError("must be above 0")
        return value

    @field_validator("cores", "trials", "memory")
    @classmethod
    def _counted(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError("must be at least 1")
        return value

    @field_validator("batch_sizes", "delays", "workers")
    @classmethod
    def _counts(cls, values: list[int] | None) -> list[int] | None:
        if values is not None and (not values or min(values) < 1):
            raise ValueError("must be a list of numbers of at least 1")
        return values

    @field_validator("length_counts")
    @classmethod
    def _few(cls, values: list[int] | None) -> list[int] | None:
        if values is not None and not all(1 <= value <= 64 for value in values):
            raise ValueError("must be a list of numbers from 1 to 64")
        return values

    @property
    def limit(self) -> Limit:
        """What each window must hold."""
        return Limit(self.p99 or math.inf, first_bytes=self.ttft or math.inf)

    def check(self) -> None:
        """Checks that the settings fit together.

        Raises:
            ConfigError: The goal is latency, and no rate is named.
        """
        if self.goal == "latency" and self.rate is None:
            raise ConfigError("the goal latency needs a rate to hold; name it: --rate 40.", key="rate")


def read_settings(file: Path | None, arguments: dict[str, Any]) -> Settings:
    """Returns the settings of a YAML file, overridden by those of the command line.

    Args:
        file: A YAML file with the fields of `Settings`; None without one.
        arguments: Fields from the command line; None is not set.

    Raises:
        ConfigError: A key is unknown, or a value is out of range.
    """
    fields: dict[str, Any] = {}
    if file is not None:
        try:
            fields = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot be read: {error}", location=str(file)) from error
        if not isinstance(fields, dict):
            raise ConfigError("must be a mapping, such as {p99: 50ms, goal: throughput}.", location=str(file))
    fields = {**fields, **{key: value for key, value in arguments.items() if value is not None}}
    try:
        settings = Settings(**fields)
    except (ValidationError, TypeError) as error:
        if not isinstance(error, ValidationError):
            raise ConfigError("has keys that are no names.", location=str(file)) from error
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        known = f" It is one of {', '.join(Settings.model_fields)}." if first["type"] == "extra_forbidden" else ""
        raise ConfigError(f"{first['msg']}.{known}", key=key, location=str(file or "")) from error
    settings.check()
    return settings


def _quantity(value: Any, units: dict[str, float] | dict[str, int], example: str, unit: str = "") -> Any:
    if not isinstance(value, str):
        return value
    parts = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", value)
    suffix = parts[2].lower().removesuffix(unit) if parts else ""
    try:
        return float(parts[1]) * units[suffix] if parts else None or _wrong(value, example)
    except (KeyError, ValueError):
        return _wrong(value, example)


def _wrong(value: str, example: str) -> Any:
    raise ValueError(f"{value!r} is not {example}")
