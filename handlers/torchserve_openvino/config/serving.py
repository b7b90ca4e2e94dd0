"""A whole model-config.yaml, checked before any model loads."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from torchserve_openvino.config.fields import UnknownWordError
from torchserve_openvino.config.openvino.devices import DeviceCatalog
from torchserve_openvino.config.openvino.precisions import BF16X3, no_bf16x3
from torchserve_openvino.config.openvino.properties import DEVICE_PROPERTIES, EXECUTION_MODE, PRECISION
from torchserve_openvino.config.options import ResolvedOptions, json_safe, pick_catalog, resolve_into
from torchserve_openvino.config.problems import KeyPath, Problems, dotted
from torchserve_openvino.config.pt2 import CompileConfig, compile_path, options_path, parse_pt2
from torchserve_openvino.config.sections.openvino_section import OpenVINOSection
from torchserve_openvino.config.spelling import listed, nearest, shown
from torchserve_openvino.config.torchserve_keys import check_torchserve_keys
from torchserve_openvino.config.yaml_source import Source, read_yaml

_PRECISION_KEY = ("handler", "openvino", "precision")
# What an execution mode stands for; the other one leaves the precision to the device.
_PRECISION_OF = {"ACCURACY": "f32"}


class Setting(NamedTuple):
    """One effective setting."""

    key: str
    value: Any
    source: str


class ServingConfig(BaseModel):
    """Effective settings of one model in TorchServe; `load_serving_config` creates it."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True)

    torchserve: dict[str, Any] = {}
    """TorchServe's own keys as they are: batchSize, maxWorkers and the like."""
    pt2: CompileConfig = CompileConfig()
    """How the model is compiled."""
    backend: ResolvedOptions | None = None
    """Options of our backend with their sources; None if another backend is configured."""
    openvino: OpenVINOSection = OpenVINOSection()
    """The section `handler.openvino`."""
    handler: dict[str, Any] = {}
    """Other keys under `handler`: the user's own, unchanged."""
    location: str = ""
    """Where the settings come from: a file's path, or a name such as ``model_yaml_config``."""
    sources: dict[str, str] = {}
    """Place of each key that was set; keys that are absent here have their defaults."""

    def effective(self) -> list[Setting]:
        """Returns every setting with its value and its source, in the order of the YAML contract."""
        rows = [self._row(key, value) for key, value in self.torchserve.items()]
        above = ".".join(str(part) for part in compile_path(self.pt2.form))
        for name in ("enabled", "backend", "dynamic", "mode", "fullgraph"):
            key = f"{above}.{'enable' if name == 'enabled' else name}"
            source = self.sources.get("pt2") if self.pt2.form == "string" and name == "backend" else None
            rows.append(self._row(key, getattr(self.pt2, name), source))
        prefix = ".".join(str(part) for part in options_path(self.pt2.form))
        if self.backend is not None:
            rows += [
                Setting(f"{prefix}.{key}", entry["value"], entry["source"])
                for key, entry in self.backend.to_dict().items()
            ]
        else:
            rows += [self._row(f"{prefix}.{key}", value) for key, value in self.pt2.options.items()]
        return rows + self._section_rows(self.openvino, ("handler", "openvino"))

    @property
    def summary(self) -> dict[str, Any]:
        """`effective` as a JSON-safe dict, ``{key: {"value": ..., "source": ...}}``."""
        return {row.key: {"value": json_safe(row.value), "source": row.source} for row in self.effective()}

    def _row(self, key: str, value: Any, source: str | None = None) -> Setting:
        return Setting(key, json_safe(value), source or self.sources.get(key, "default"))

    def _section_rows(self, section: BaseModel, path: KeyPath) -> list[Setting]:
        rows: list[Setting] = []
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                rows += self._section_rows(value, (*path, name))
            else:
                plain = section.model_dump(mode="json", include={name}, exclude_none=True).get(name)
                rows.append(self._row(dotted((*path, name)), plain))
        return rows


def load_serving_config(
    source: str | Path | Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    location: str | None = None,
    check_device: bool = True,
    catalog: DeviceCatalog | None = None,
) -> ServingConfig:
    """Reads and checks a model-config.yaml.

    Args:
        source: Path of the file, or its parsed content (messages then lack the line); not modified.
        env: Environment variables; ``os.environ`` if None.
        location: Name of a parsed mapping in messages.
        check_device: Whether the devices must exist on this machine and accept the properties.
        catalog: Devices to check against instead of this machine's.

    Raises:
        ConfigError: With the key, its place, what is wrong and the nearest valid name. A single problem is
            raised as its own class (`DeviceNotFoundError`, `UnknownOperatorError`), several as one `ConfigErrors`.
    """
    if isinstance(source, Mapping):
        read = Source(source, location or "model_yaml_config")
    else:
        read = read_yaml(Path(source))
    problems = read.problems()
    data = read.data
    torchserve = check_torchserve_keys(data, problems)
    pt2 = parse_pt2(data, problems)
    section, own = _handler(data, problems)
    backend = None
    if pt2.is_openvino:
        options = _raw_options(data, pt2)
        at = problems.at(*options_path(pt2.form))
        catalog = catalog or pick_catalog(check_device)
        backend = resolve_into(at, options, env=env, catalog=catalog)
        if backend.options.verify != "off":
            at.add(
                ("verify",),
                "is for torchserve_openvino.compile in Python: a served model is compared with eager "
                "PyTorch before READY, as handler.openvino.verify says; remove it.",
            )
        backend = _with_all_pieces(_with_fallback_to(backend, section, problems), section)
        _check_precision(backend, section, dotted(options_path(pt2.form)), problems)
        checked = catalog.available() is not None or backend.options.device != "CPU"
        if section.precision == BF16X3 and checked and (why := no_bf16x3(backend.options.device)):
            problems.add(_PRECISION_KEY, f"{BF16X3} {why}")
    elif pt2.enabled and "precision" in section.model_fields_set:
        problems.add(_PRECISION_KEY, f"has no effect with the backend {pt2.backend}; remove it, or the backend.")
    problems.raise_if_any(read.name)
    return ServingConfig(
        torchserve=torchserve,
        pt2=pt2,
        backend=backend,
        openvino=section,
        handler=own,
        location=read.name,
        sources={dotted(path): read.location(path) for path in _paths(data)},
    )


def _raw_options(data: Mapping[Any, Any], pt2: CompileConfig) -> Any:
    if pt2.form not in {"mapping", "compile"}:
        return None
    above = data["pt2"] if pt2.form == "mapping" else data["pt2"]["compile"]
    return above.get("options") if isinstance(above, Mapping) else None


def _handler(data: Mapping[Any, Any], problems: Problems) -> tuple[OpenVINOSection, dict[str, Any]]:
    """Returns our section, and the user's own keys beside it."""
    value = data.get("handler")
    problems = problems.at("handler")
    if value is None:
        return OpenVINOSection(), {}
    if not isinstance(value, Mapping):
        problems.add((), f"must be a mapping, not {shown(value)}.")
        return OpenVINOSection(), {}
    own = {key: item for key, item in value.items() if key != "openvino"}
    for key in own:
        if not isinstance(key, str):
            problems.add((str(key),), f"must be text in quotes, not {shown(key)}: a key of this mapping is a name.")
            continue
        # Other keys are the user's own, but one that resembles our name is a typo.
        if nearest(key, ("openvino",), cutoff=0.8):
            problems.add((str(key),), "unknown key.", suggestion="openvino")
    section = value.get("openvino")
    if section is None:
        return OpenVINOSection(), own
    try:
        return OpenVINOSection.model_validate(section), own
    except ValidationError as error:
        note_errors(error, OpenVINOSection, problems.at("openvino"))
        return OpenVINOSection(), own


def _with_fallback_to(backend: ResolvedOptions, section: OpenVINOSection, problems: Problems) -> ResolvedOptions:
    """Merges the two keys of one setting: `handler.openvino.fallback.to` and the option `fallback_to`."""
    if "to" not in section.fallback.model_fields_set:
        return backend
    keys = ("handler", "openvino", "fallback", "to")
    is_set = backend.sources["fallback_to"] != "default"
    if is_set and backend.options.fallback_to != section.fallback.to:
        other = backend.options.fallback_to
        problems.add(keys, f"is {section.fallback.to}, but the option fallback_to is {other}; set only one of them.")
    if is_set:
        return backend
    options = replace(backend.options, fallback_to=section.fallback.to)
    return ResolvedOptions(options, {**backend.sources, "fallback_to": problems.location(*keys)})


def _check_precision(backend: ResolvedOptions, section: OpenVINOSection, options: str, problems: Problems) -> None:
    """Refuses a precision that the options of OpenVINO contradict: one of the two would silently have no effect."""
    if "precision" not in section.model_fields_set:
        return
    if backend.options.precision is not None:
        problems.add(
            _PRECISION_KEY,
            f"is {section.precision}, and {options}.precision is {backend.options.precision}; remove one of them.",
        )
        return
    config = backend.options.config
    nested: Mapping[str, Mapping[str, Any]] = config.get(DEVICE_PROPERTIES) or {}
    stated = [("config", config)] + [
        (f"config.{DEVICE_PROPERTIES}.{device}", values) for device, values in nested.items()
    ]
    is_stated = False
    for path, values in stated:
        for name in {PRECISION, EXECUTION_MODE} & set(values):
            is_stated = True
            if _PRECISION_OF.get(values[name], values[name]) != section.precision:
                problems.add(
                    _PRECISION_KEY,
                    f"is {section.precision}, but {options}.{path}.{name} is {values[name]}, which OpenVINO would "
                    f"follow instead; remove {name} (this key sets it), or remove this key.",
                )
    if not is_stated and backend.sources.get(f"config.{PRECISION}") != "default":
        device = backend.options.device
        problems.add(
            _PRECISION_KEY,
            f"has no effect on {device}, as an NPU computes in f16 only; remove it. Other devices beside an NPU take "
            f"theirs by {options}.config.{DEVICE_PROPERTIES}.",
        )


def _with_all_pieces(backend: ResolvedOptions, section: OpenVINOSection) -> ResolvedOptions:
    """Keeps no small partition in eager PyTorch for speed if the policy would count it against the model."""
    allow, is_set = section.fallback.allow, backend.options.min_partition_us is not None
    if is_set or ((allow == "all" or "tiny_partition" in allow) and not section.fallback.min_coverage):
        return backend
    options = replace(backend.options, min_partition_us=0.0)
    return ResolvedOptions(options, {**backend.sources, "min_partition_us": "handler.openvino.fallback"})


def _paths(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    paths = [path] if path else []
    if isinstance(value, Mapping):
        for key, item in value.items():
            paths += _paths(item, (*path, str(key)))
    return paths


# --- turns pydantic's errors into problems of our own -------------------------------------------------------------


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is not None:
        return next((model for argument in get_args(annotation) if (model := _model_in(argument))), None)
    return None


def _model_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> type[BaseModel]:
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return model


def note_errors(error: ValidationError, model: type[BaseModel], problems: Problems) -> None:
    """Adds each error of a failed validation to ``problems``.

    Args:
        error: What pydantic raised.
        model: The model that was validated against.
        problems: Collects the errors; its prefix is the path of the model.
    """
    for entry in error.errors(include_url=False):
        message, suggestion = _explain(entry, model)
        problems.add(tuple(entry["loc"]), message, suggestion=suggestion)


def _explain(entry: Any, model: type[BaseModel]) -> tuple[str, str | None]:
    kind, loc, context = entry["type"], entry["loc"], entry.get("ctx") or {}
    value = entry.get("input")
    if kind == "extra_forbidden":
        valid = list(_model_at(model, loc[:-1]).model_fields)
        return f"unknown key; valid keys: {listed(valid)}.", nearest(str(loc[-1]), valid)
    if kind == "missing":
        return "is missing.", None
    if kind == "literal_error":
        allowed = [word.strip().strip("'") for word in str(context["expected"]).replace(" or ", ",").split(",")]
        return f"must be one of {listed(allowed)}, not {shown(value)}.", nearest(str(value), allowed)
    if kind == "value_error":
        cause = context.get("error")
        return str(cause), cause.suggestion if isinstance(cause, UnknownWordError) else None
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return f"must be a mapping, not {shown(value)}.", None
    if kind in {"list_type", "tuple_type"}:
        return f"must be a list, not {shown(value)}.", None
    text = str(entry["msg"]).removeprefix("Input should ").rstrip(".")
    text = f"must {text}" if text != entry["msg"].rstrip(".") else text
    return f"{text}, not {shown(value)}.", None
