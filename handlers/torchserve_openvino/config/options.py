"""The `options` of torch.compile: OpenVINO's own names, checked, with the source of each effective value."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from torchserve_openvino.config.op_names import check_decomposable, check_operators
from torchserve_openvino.config.openvino.devices import (
    DeviceCatalog,
    DeviceSpec,
    SystemCatalog,
    UncheckedCatalog,
    check_present,
    parse_device,
)
from torchserve_openvino.config.openvino.precisions import check_precision
from torchserve_openvino.config.openvino.properties import (
    PRECISION,
    check_properties,
    with_default_precision,
)
from torchserve_openvino.config.problems import Problems
from torchserve_openvino.config.spelling import listed, nearest, parse_bool, shown
from torchserve_openvino.config.vocabulary import MAX_NUMBER

ENV_DEVICE = "OPENVINO_TORCH_BACKEND_DEVICE"
ENV_MODEL_CACHING = "OPENVINO_TORCH_MODEL_CACHING"
ENV_CACHE_DIR = "OPENVINO_TORCH_CACHE_DIR"
ENV_DEFAULTS = {"device": ENV_DEVICE, "model_caching": ENV_MODEL_CACHING, "cache_dir": ENV_CACHE_DIR}

_FALLBACKS = ("eager", "inductor")
_VERIFY = ("off", "first")


@dataclass(frozen=True)
class BackendOptions:
    """Options of the backend in canonical form; `resolve_options` checks what a user wrote and builds them.

    Not a pydantic model: the import would take a tenth of a warm start. `config.reference` reads its pydantic settings.
    """

    __pydantic_config__: ClassVar[dict[str, bool]] = {"use_attribute_docstrings": True}
    device: str = "CPU"
    """`CPU`, `GPU`, `GPU.0`, `NPU`, `AUTO:GPU,CPU`, `HETERO:GPU,CPU`, `MULTI:GPU,CPU`. Environment:
    `OPENVINO_TORCH_BACKEND_DEVICE`."""
    aot_autograd: bool = True
    """Accepted for compatibility; graphs are always lowered through AOTAutograd."""
    model_caching: bool = False
    """Keep compiled models in `cache_dir`. Environment: `OPENVINO_TORCH_MODEL_CACHING`."""
    cache_dir: str | None = None
    """Folder of the cache, absolute or relative to the user's cache folder, which is the default; or a URL that fsspec
    knows (`s3://bucket/folder`), which machines share. Environment: `OPENVINO_TORCH_CACHE_DIR`."""
    decompositions: tuple[str, ...] = ()
    """Operators to decompose before partitioning: `aten.addcdiv` (all overloads) or `aten.addcdiv.default`."""
    disabled_ops: tuple[str, ...] = ()
    """Operators to run in eager, counted as fallbacks: `aten.relu.default`, `aten::relu`, `aten.relu`,
    `torch.ops.aten.relu.default`. A name that torch decomposes first (`aten.linear`) gets a warning."""
    config: dict[str, Any] = field(default_factory=dict)
    """OpenVINO properties, for example `{PERFORMANCE_HINT: LATENCY, INFERENCE_PRECISION_HINT: bf16}`."""
    precision: Literal["f32", "bf16x3", "bf16", "f16"] | None = None
    """Precision of computation; `bf16x3` is f32 with products on AMX (docs/verification.md). Unset: `f32`, or what
    `INFERENCE_PRECISION_HINT` in `config` says; both together are an error."""
    testing: bool = False
    """Upstream's flag, the same as `min_partition_us: 0`."""
    fallback_to: Literal["eager", "inductor"] = "eager"
    """Where a partition runs that OpenVINO could not convert or compile."""
    min_partition_us: float | None = None
    """Partitions that eager PyTorch runs in fewer microseconds stay in eager, because calling OpenVINO costs more.
    Unset: 100 for a graph in several pieces; 0 for a graph in one piece, and where `fallback` refuses `tiny_partition`
    or has a `min_coverage`. 0 sends every partition to OpenVINO."""
    verify: Literal["off", "first"] = "off"
    """In Python only: `first` compares the first call of each new graph with eager PyTorch, once, and raises an error
    if they differ. A served model is compared before READY anyway (`handler.openvino.verify`)."""

    def ov_config(self) -> dict[str, Any]:
        """Returns the properties for ``core.compile_model``.

        `config`, plus ``INFERENCE_PRECISION_HINT: f32`` where neither precision nor execution mode is stated (an NPU
        excepted, which computes in f16). The hint may be ``bf16x3``, which `backend.runtime.build` replaces.
        """
        return self._ov_config()[0]

    def _ov_config(self) -> tuple[dict[str, Any], str | None]:
        stated = {} if self.precision is None else {PRECISION: self.precision}
        return with_default_precision({**self.config, **stated}, self._spec())

    def _spec(self) -> DeviceSpec:
        spec = parse_device(self.device, Problems(lambda _: "options"))
        return spec if spec is not None else DeviceSpec(self.device)


OPTION_NAMES = tuple(option.name for option in fields(BackendOptions))


@dataclass(frozen=True)
class ResolvedOptions:
    """Effective options and where each came from.

    Attributes:
        options: Canonical values.
        sources: For each option and each OpenVINO property (``config.NAME``): ``default``, ``env NAME``,
            ``options``, or a place in a file.
    """

    options: BackendOptions
    sources: Mapping[str, str]

    def values(self) -> dict[str, Any]:
        """Returns the effective values, keyed like `sources`: OpenVINO properties one by one as ``config.NAME``."""
        plain = {name: getattr(self.options, name) for name in OPTION_NAMES if name != "config"}
        return plain | {f"config.{name}": value for name, value in self.options.ov_config().items()}

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns ``{"device": {"value": "CPU", "source": "default"}, ...}``, JSON-safe."""
        return {
            key: {"value": json_safe(value), "source": self.sources.get(key, "default")}
            for key, value in self.values().items()
        }


def json_safe(value: Any) -> Any:
    """Returns the value with tuples as lists and anything that JSON lacks as a string."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def resolve_options(
    options: Mapping[str, Any] | None,
    *,
    env: Mapping[str, str] | None = None,
    location: str = "options",
    check_device: bool = True,
    catalog: DeviceCatalog | None = None,
) -> ResolvedOptions:
    """Checks the `options` of torch.compile and adds the defaults of the environment.

    Args:
        options: Keyed by OpenVINO's names; not modified. They override the environment.
        env: Environment variables; ``os.environ`` if None.
        location: Name of the options in messages and in `ResolvedOptions.sources`.
        check_device: Whether the devices must exist on this machine and accept the properties.
        catalog: Devices to check against instead of this machine's.

    Raises:
        DeviceNotFoundError: A named device is absent.
        UnknownOperatorError: Torch does not know an operator.
        ConfigError: Anything else is wrong; several problems are raised as one error.
    """
    problems = Problems(lambda _: location)
    resolved = resolve_into(problems, options, env=env, catalog=catalog or pick_catalog(check_device))
    problems.raise_if_any()
    return resolved


def pick_catalog(check_device: bool) -> DeviceCatalog:
    """Returns a catalog of this machine's devices, or one that does not check devices."""
    return SystemCatalog() if check_device else UncheckedCatalog()


def resolve_into(
    problems: Problems,
    options: Mapping[str, Any] | None,
    *,
    env: Mapping[str, str] | None,
    catalog: DeviceCatalog,
) -> ResolvedOptions:
    """Like `resolve_options`, but collects problems instead of raising them; what is invalid gets its default."""
    env = os.environ if env is None else env
    if options is None:
        options = {}
    elif not isinstance(options, Mapping):
        problems.add((), f"must be a mapping of options, not {shown(options)}.")
        options = {}
    for key in options:
        if key not in OPTION_NAMES:
            hint = nearest(str(key), OPTION_NAMES)
            message = f"unknown option; valid options: {listed(OPTION_NAMES)}."
            problems.add((str(key),), message, suggestion=hint)

    return _Resolver(problems, options, env, catalog).run()


class _Resolver:
    def __init__(
        self, problems: Problems, options: Mapping[str, Any], env: Mapping[str, str], catalog: DeviceCatalog
    ) -> None:
        self.problems = problems
        self.given = options
        self.env = env
        self.catalog = catalog
        self.sources = dict.fromkeys(OPTION_NAMES, "default")
        del self.sources["config"]

    def run(self) -> ResolvedOptions:
        spec = self._device()
        values: dict[str, Any] = {"device": spec.name}
        for name in ("aot_autograd", "model_caching", "testing"):
            values[name] = self._bool(name)
        values["cache_dir"] = self._cache_dir(values["model_caching"])
        values["decompositions"] = self._operators("decompositions")
        values["disabled_ops"] = self._operators("disabled_ops")
        values["fallback_to"] = self._choice("fallback_to", _FALLBACKS)
        values["verify"] = self._choice("verify", _VERIFY)
        values["min_partition_us"] = self._microseconds("min_partition_us")
        if values["testing"] and values["min_partition_us"] is None:
            values["min_partition_us"] = 0.0
        values["config"] = self._config(spec)
        present = self.catalog.available() is not None
        stated = self._value("precision")
        values["precision"] = check_precision(stated, spec.name, values["config"], present, self.problems)
        check_decomposable(values["decompositions"], self.problems)
        options = BackendOptions(**values)
        effective, added = options._ov_config()
        for name in effective:
            if name == added and name not in values["config"]:
                self.sources[f"config.{name}"] = "default"
            elif name == PRECISION and options.precision is not None:
                self.sources[f"config.{name}"] = self.sources["precision"]
            else:
                self.sources[f"config.{name}"] = self.problems.location("config", name)
        return ResolvedOptions(options, self.sources)

    def _value(self, name: str) -> Any:
        """Returns what the user gave: the option, else the environment variable, else None."""
        if self.given.get(name) is not None:
            self.sources[name] = self.problems.location(name)
            return self.given[name]
        variable = ENV_DEFAULTS.get(name, "")
        if self.env.get(variable, "").strip():
            self.sources[name] = f"env {variable}"
            return self.env[variable].strip()
        return None

    def _problems_of(self, name: str) -> tuple[Problems, tuple[str, ...]]:
        """Returns where to report a problem of an option: at its key, or at the environment variable that set it."""
        if self.sources[name].startswith("env "):
            problems = Problems(lambda _: "environment")
            problems._found = self.problems._found
            return problems, (ENV_DEFAULTS[name],)
        return self.problems, (name,)

    def _device(self) -> DeviceSpec:
        value = self._value("device")
        if value is None:
            value = "CPU"
        problems, keys = self._problems_of("device")
        spec = parse_device(value, problems, keys)
        if spec is None:
            return DeviceSpec("CPU", members=("CPU",))
        check_present(spec, self.catalog, problems, keys)
        return spec

    def _bool(self, name: str) -> bool:
        default: bool = getattr(BackendOptions, name)
        value = self._value(name)
        if value is None:
            return default
        flag = parse_bool(value)
        if flag is None:
            problems, keys = self._problems_of(name)
            problems.add(keys, f"must be true or false, not {shown(value)}.")
            return default
        return flag

    def _cache_dir(self, model_caching: bool) -> str | None:
        value = self._value("cache_dir")
        if value is None:
            return str(cache_root(self.env)) if model_caching else None
        problems, keys = self._problems_of("cache_dir")
        return self._absolute(value, problems, keys)

    def _absolute(self, value: Any, problems: Problems, keys: tuple[str, ...]) -> str | None:
        if not isinstance(value, (str, os.PathLike)) or not str(value).strip():
            problems.add(keys, f"must be the path of a folder, not {shown(value)}.")
            return None
        if "://" in str(value):
            return str(value)
        try:
            path = cache_root(self.env) / Path(value).expanduser()
            if path.exists() and not path.is_dir():
                problems.add(keys, f"{str(path)!r} is not a folder.")
        except (OSError, ValueError, RuntimeError) as error:
            # A name that is too long, a null character, ~somebody.
            problems.add(keys, f"cannot be a folder: {error!s:.200}.")
            return None
        return os.path.normpath(path)

    def _operators(self, name: str) -> tuple[str, ...]:
        value = self._value(name)
        return () if value is None else check_operators(value, self.problems, (name,))

    def _choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Returns one of several words, of which the first is the default."""
        value = self._value(name)
        if value is None or value in choices:
            return choices[0] if value is None else str(value)
        message = f"must be one of {listed(choices)}, not {shown(value)}."
        self.problems.add((name,), message, suggestion=nearest(str(value), choices))
        return choices[0]

    def _microseconds(self, name: str) -> float | None:
        value = self._value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_NUMBER:
            self.problems.add((name,), f"must be a number of microseconds of at least 0, not {shown(value)}.")
            return None
        return float(value)

    def _config(self, spec: DeviceSpec) -> dict[str, Any]:
        value = self.given.get("config")
        if value is None:
            return {}
        problems = self.problems.at("config")
        if not isinstance(value, Mapping):
            problems.add((), f"must be a mapping of OpenVINO properties, not {shown(value)}.")
            return {}
        config = check_properties(value, spec, self.catalog, problems)
        if "CACHE_DIR" in config:
            absolute = self._absolute(config["CACHE_DIR"], problems, ("CACHE_DIR",))
            config["CACHE_DIR"] = absolute if absolute is not None else ""
        return config


__all__ = ["OPTION_NAMES", "BackendOptions", "ResolvedOptions", "cache_root", "json_safe", "resolve_options"]


# --- where the cache lies if no folder is stated ------------------------------------------------------------------


_CACHE_FOLDER = "torchserve-openvino"


def cache_root(env: Mapping[str, str] | None = None) -> Path:
    """Returns the absolute path of the user's cache folder: the default, and the base of a relative ``cache_dir``.

    Args:
        env: Environment variables; ``os.environ`` if None.
    """
    base = Path((os.environ if env is None else env).get("XDG_CACHE_HOME", "")).expanduser()
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / _CACHE_FOLDER
