"""Parses the key `pt2`, in every form that TorchServe accepts."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from torchserve_openvino.config import vocabulary
from torchserve_openvino.config.problems import KeyPath, Problems
from torchserve_openvino.config.spelling import listed, nearest, parse_bool, shown

# torch.compile's modes; only Inductor uses them.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_KWARGS = ("backend", "mode", "dynamic", "fullgraph", "options")

Form = Literal["none", "string", "mapping", "compile", "export"]


class CompileConfig(BaseModel):
    """How the model is compiled.

    `pt2: openvino` is form "string", `pt2: {backend: ...}` "mapping", `pt2: {compile: {...}}` "compile".
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    enabled: bool = True
    """False leaves the model to eager PyTorch."""
    backend: str = "openvino"
    """openvino (or openvino_serving), openvino_ts (converted through TorchScript) and export (captured by
    torch.export) are this package's; any other Dynamo backend is passed through."""
    dynamic: bool | None = None
    """torch.compile's `dynamic`: True for symbolic shapes from the start, False for one graph per shape. Unset: False
    for this package's backends; for others torch's choice, static first and dynamic once a size changes."""
    mode: str | None = None
    """torch.compile's `mode`, for Inductor."""
    fullgraph: bool = False
    """Refuse graph breaks."""
    options: dict[str, Any] = {}
    """Options of a foreign backend as given; ours are resolved into `ServingConfig.backend`."""
    form: Form = "none"
    """Form in which the YAML wrote `pt2`."""

    @property
    def is_openvino(self) -> bool:
        """Whether the backend is this package's."""
        return self.backend in vocabulary.OURS


def options_path(form: Form) -> KeyPath:
    """Returns the path of `options` in this form."""
    return ("pt2", "compile", "options") if form == "compile" else ("pt2", "options")


def compile_path(form: Form) -> KeyPath:
    """Returns the path of the mapping that holds `backend`, `dynamic` and the like in this form."""
    return ("pt2", "compile") if form == "compile" else ("pt2",)


def parse_pt2(data: Mapping[Any, Any], problems: Problems) -> CompileConfig:
    """Reads `pt2`.

    Args:
        data: The whole model-config.yaml. Without `pt2` the model is compiled with OpenVINO: choosing
            a handler of this package implies that.
        problems: Collects what is wrong; its prefix is empty.
    """
    value = data.get("pt2")
    if value is None:
        return CompileConfig()
    problems = problems.at("pt2")
    if isinstance(value, str):
        known = _check_backend(value, problems, ())
        return CompileConfig(backend=value if known else "openvino", form="string")
    if not isinstance(value, Mapping):
        problems.add((), f"must be a backend's name or a mapping, not {shown(value)}.")
        return CompileConfig()
    if "compile" in value:
        return _compile_form(value, problems)
    if "export" in value:
        _check_export(value, problems)
        _unknown_keys(value, ("compile", "export"), problems)
        return CompileConfig(form="export")
    if "enable" in value:
        message = "is outside of 'compile'; write pt2: {compile: {enable: ..., backend: ...}}."
        problems.add(("enable",), message, suggestion="compile.enable")
    _unknown_keys(value, ("compile", "export", "disable", *_KWARGS), problems, known=("enable",))
    enabled = not _flag(value, "disable", False, problems)
    return _from_kwargs(value, problems, form="mapping", enabled=enabled)


def _compile_form(value: Mapping[Any, Any], problems: Problems) -> CompileConfig:
    _unknown_keys(value, ("compile", "export"), problems)
    if "export" in value:
        _check_export(value, problems)
    inner = value["compile"]
    problems = problems.at("compile")
    if inner is None:
        return CompileConfig(form="compile")
    if not isinstance(inner, Mapping):
        problems.add((), f"must be a mapping such as {{enable: true, backend: openvino}}, not {shown(inner)}.")
        return CompileConfig(form="compile")
    _unknown_keys(inner, ("enable", *_KWARGS), problems)
    return _from_kwargs(inner, problems, form="compile", enabled=_flag(inner, "enable", True, problems))


def _check_export(value: Mapping[Any, Any], problems: Problems) -> None:
    export = value["export"]
    keys = ("export",)
    if export is None:
        return
    if not isinstance(export, Mapping):
        problems.add(keys, f"must be a mapping, not {shown(export)}.")
        return
    _unknown_keys(export, ("aot_compile",), problems.at("export"))
    if _flag(export, "aot_compile", False, problems.at("export")):
        message = (
            "an AOTInductor library does not run on OpenVINO. Archive the model itself (or its "
            "torch.export .pt2) and use pt2: {compile: {enable: true, backend: openvino}}."
        )
        problems.add(("export", "aot_compile"), message)


def _from_kwargs(arguments: Mapping[Any, Any], problems: Problems, *, form: Form, enabled: bool) -> CompileConfig:
    backend = arguments.get("backend")
    if backend is None:
        backend = "openvino"
    elif not isinstance(backend, str):
        problems.add(("backend",), f"must be a backend's name, not {shown(backend)}.")
        backend = "openvino"
    elif not _check_backend(backend, problems, ("backend",)):
        # The rest is checked as if it were ours, so that the user sees all errors at once.
        backend = "openvino"
    ours = backend in vocabulary.OURS
    options = arguments.get("options")
    # For our backends, `resolve_into` reports this; it would be reported twice otherwise.
    if options is not None and not isinstance(options, Mapping) and not ours:
        problems.add(("options",), f"must be a mapping, not {shown(options)}.")
    options = dict(options) if isinstance(options, Mapping) else {}
    for key in [key for key in options if not isinstance(key, str)]:
        problems.add(
            ("options", str(key)), f"must be text in quotes, not {shown(key)}: a key of this mapping is a name."
        )
        del options[key]
    return CompileConfig(
        enabled=enabled,
        backend=backend,
        dynamic=_flag(arguments, "dynamic", None, problems),
        mode=_mode(arguments.get("mode"), ours, bool(options), problems),
        fullgraph=bool(_flag(arguments, "fullgraph", False, problems)),
        options=options,
        form=form,
    )


def _flag(arguments: Mapping[Any, Any], key: str, default: Any, problems: Problems) -> Any:
    value = arguments.get(key)
    if value is None:
        return default
    # TorchServe compares with `== True`, so the string 'true' counts as false there. Here it is true, as in `options`.
    if (flag := parse_bool(value)) is not None:
        return flag
    problems.add((key,), f"must be true or false, not {shown(value)}.")
    return default


def _mode(mode: Any, ours: bool, has_options: bool, problems: Problems) -> str | None:
    if mode is None:
        return None
    if ours:
        if mode == "default":
            return None
        message = (
            f"{shown(mode)} is a mode of Inductor and has no meaning for OpenVINO; use "
            "options: {config: {PERFORMANCE_HINT: LATENCY}} or THROUGHPUT."
        )
        problems.add(("mode",), message)
        return None
    if mode not in MODES:
        hint = nearest(str(mode), MODES)
        problems.add(("mode",), f"must be one of {listed(MODES)}, not {shown(mode)}.", suggestion=hint)
        return None
    if has_options:
        problems.add(("mode",), "cannot be combined with options; torch.compile accepts only one of them.")
    return str(mode)


def _check_backend(backend: str, problems: Problems, keys: KeyPath) -> bool:
    """Returns True if torch.compile has the backend; adds a problem otherwise."""
    if backend in vocabulary.OURS:
        return True
    if backend in vocabulary.REMOVED:
        problems.add(keys, vocabulary.REMOVED[backend])
        return False
    # A name close to one of ours is a typo: no need to import torch, which takes seconds.
    if nearest(backend, vocabulary.OURS, cutoff=0.8) is None:
        from torch._dynamo import list_backends

        known = list_backends(exclude_tags=())
        if backend in known:
            return True
    else:
        known = []
    names = sorted({*known, *vocabulary.OURS})
    message = f"unknown torch.compile backend {backend!r}" + (f"; valid backends: {listed(names)}." if known else ".")
    problems.add(keys, message, suggestion=nearest(backend, names))
    return False


def _unknown_keys(
    arguments: Mapping[Any, Any], valid: tuple[str, ...], problems: Problems, known: tuple[str, ...] = ()
) -> None:
    for key in arguments:
        if key not in valid and key not in known:
            message = f"unknown key; valid keys: {listed(valid)}."
            problems.add((str(key),), message, suggestion=nearest(str(key), valid))
