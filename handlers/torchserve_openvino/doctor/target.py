"""Loads what is diagnosed: an eager model, one call of it, and the options that it is compiled with."""

import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from torchserve_openvino.config import ResolvedOptions, ServingConfig, load_serving_config, resolve_options
from torchserve_openvino.config.sections.openvino_section import (
    MeasureSection,
    OpenVINOSection,
    VerifySection,
    WarmupInput,
)
from torchserve_openvino.config.yaml_source import read_yaml
from torchserve_openvino.errors import ConfigError, ModelLoadError
from torchserve_openvino.files.json_text import read_json_object
from torchserve_openvino.ops.mappings import load_mappings
from torchserve_openvino.packaging.archive import extract
from torchserve_openvino.serving import precision
from torchserve_openvino.serving.loading.archive_manifest import MANIFEST
from torchserve_openvino.serving.loading.exported_program import load_program
from torchserve_openvino.serving.loading.files import ProgramModule, archive_kind, read_samples
from torchserve_openvino.serving.loading.op_mappings import load_archived_mappings
from torchserve_openvino.serving.loading.torchscript import load_torchscript
from torchserve_openvino.serving.shapes.input_spec import Inputs, InputSpec, Signature, declared_specs, parameter_names
from torchserve_openvino.serving.shapes.inputs import DeclaredInputs
from torchserve_openvino.serving.torchserve.archive_loader import load_handler
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.serving.verification.admission import Admission
from torchserve_openvino.serving.verification.judge import Judge
from torchserve_openvino.serving.verification.measures import KEY as MEASURE_KEY
from torchserve_openvino.serving.verification.measures import Measure, with_bounds

# Names of model factories to look for if the command line names none.
FACTORIES = ("model", "make_model", "get_model", "build")
EXAMPLES = "example_inputs"
_AUTO_NOTE = (
    f"{precision.KEY} is auto, which only a worker decides: this is f32. The report of a worker has its choice "
    "(config.precision_choice); state that precision to diagnose it."
)
_EAGER_CONFIG = "eager-model-config.yaml"


class SampleCall(NamedTuple):
    """One call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class TargetSpec:
    """A model as the command line names it, from which another process can load the same one.

    Attributes:
        path: A ``.mar``, a ``.pt2``, TorchScript (``.pt``), ``FILE.py`` or ``FILE.py:NAME``.
        config: A model-config.yaml; if None, that of the archive is used, or the defaults.
        inputs: One text for each input, as `parse_input` reads it; if empty, the model or its YAML gives them.
        mappings: Files with operator mappings, in addition to those that the YAML names.
    """

    path: str
    config: str | None = None
    inputs: tuple[str, ...] = ()
    mappings: tuple[str, ...] = ()


@dataclass
class Target:
    """A loaded model.

    Attributes:
        model: The eager model, in evaluation mode.
        call: The inputs that it is run with.
        options: The backend's options, without any cache.
        name: Name to display.
        dynamic: Whether sizes are symbolic, as in `compile`.
        backend: ``openvino``, ``openvino_ts`` or ``export``.
        verify: Limits that a worker checks answers against.
        measure: How the archive's task judges a narrower precision; None if only numbers are compared.
        config_path: The user's YAML file that the options came from; None if the user gave none.
        root: Folder to which the paths of its source lines are made relative, if any.
        notes: What the diagnosis does in another way than a worker.
        source: The Python file that the model came from; empty for other kinds of files.
        keep: Object that must live as long as the model, such as the folder of an unpacked archive.
    """

    model: Any
    call: SampleCall
    options: ResolvedOptions
    name: str
    dynamic: bool = False
    backend: str = "openvino"
    verify: VerifySection = field(default_factory=VerifySection)
    measure: Measure | None = None
    config_path: Path | None = None
    root: Path | None = None
    source: str = ""
    notes: tuple[str, ...] = ()
    keep: Any = field(default=None, repr=False)

    def judge_in(self, precision: str) -> Judge:
        """Returns what judges answers in a precision, as a worker would."""
        section = OpenVINOSection(verify=self.verify)
        return Admission(self.model, section, (), measure=self.measure).judge_in(precision)


@dataclass
class _Loaded:
    """What was loaded from a file of one kind.

    Attributes:
        handler: The archive's handler, which may know the inputs and read samples.
        config_file: The archive's own YAML.
    """

    model: Any
    inputs: Inputs | None = None
    handler: Any = None
    config_file: Path | None = None
    root: Path | None = None
    keep: Any = None


def load_target(spec: TargetSpec) -> Target:
    """Loads the model that the command line names.

    The inputs come from the command line; else from what ``handler.openvino.warmup`` declares; else from the factory or
    the exported program; else from a sample in the archive.

    Raises:
        ModelLoadError: The file does not exist, contains no model, or the model's inputs are unknown.
        ConfigError: The YAML or an input is not valid.
        PackagingError: The archive is damaged.
    """
    text, _, factory = spec.path.rpartition(":") if ".py:" in spec.path else (spec.path, "", "")
    path = Path(text).expanduser()
    if not path.is_file():
        raise ModelLoadError(f"file not found: {text!r}. Give a .mar, a .pt2, or a Python file with a model factory.")
    loaded = _load(path, factory)
    # Load the mappings after the model, whose file may define the mapped operators, and before the YAML is checked,
    # which may name operators that the mappings define.
    yaml_file = Path(spec.config) if spec.config is not None else loaded.config_file
    if yaml_file is not None:
        load_archived_mappings(yaml_file.parent, read_yaml(yaml_file).data)
    for mapping in spec.mappings:
        load_mappings(mapping)
    config = load_serving_config(yaml_file) if yaml_file is not None else ServingConfig()
    verify, measure = _verification(loaded, config)
    return Target(
        model=loaded.model,
        call=SampleCall(*_inputs(loaded, spec, config, path.name)),
        options=_options(config),
        notes=tuple(_notes(loaded, config)),
        name=f"{path.name}:{factory}" if factory else path.name,
        dynamic=bool(config.pt2.dynamic) or config.openvino.batching.mode == "dynamic",
        backend=config.pt2.backend if config.pt2.is_openvino else "openvino",
        verify=verify,
        measure=measure,
        config_path=Path(spec.config) if spec.config is not None else None,
        root=loaded.root,
        source=str(path.resolve()) if path.suffix == ".py" else "",
        keep=loaded.keep,
    )


def _load(path: Path, factory: str) -> _Loaded:
    if path.suffix == ".mar":
        return _from_archive(path)
    if path.suffix == ".py":
        return _from_file(path, factory)
    kind = archive_kind(path)
    if kind == "exported":
        return _from_program(path)
    if kind == "torchscript":
        return _Loaded(load_torchscript(path).eval())
    raise ModelLoadError(
        f"{path} is not a model with its code: give a .mar, a .pt2 of torch.export.save, a .pt of torch.jit.save, or a "
        f"Python file with a function ({', '.join(FACTORIES)}) that returns the model."
    )


# --- one function for each kind of file ---------------------------------------------------------------------------


def _from_archive(path: Path) -> _Loaded:
    """Loads a model with its archive's handler, but without compiling it: a model that is refused loads too."""
    scratch = tempfile.TemporaryDirectory(prefix="torchserve-openvino-doctor-")
    folder = Path(scratch.name)
    extract(path, folder)
    manifest = read_json_object(folder / MANIFEST)
    stated = folder / manifest["model"].get("configFile", "")
    data = dict(read_yaml(stated).data) if stated.is_file() else {}
    (folder / _EAGER_CONFIG).write_text(yaml.safe_dump({**data, "pt2": {"compile": {"enable": False}}}), "utf-8")
    manifest["model"]["configFile"] = _EAGER_CONFIG
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    try:
        handler = load_handler(folder)
    except Exception as error:
        raise ModelLoadError(f"the handler of {path.name} does not load: {type(error).__name__}: {error}") from error
    model = getattr(worker_of(handler), "eager_model", None)
    model = model if model is not None else getattr(handler, "model", None)
    if not callable(model):
        raise ModelLoadError(f"the handler of {path.name} keeps no model in its attribute `model`.")
    config_file = stated if stated.is_file() else None
    return _Loaded(model, handler=handler, config_file=config_file, root=folder, keep=scratch)


def _from_program(path: Path) -> _Loaded:
    program = load_program(path)
    # The program contains the example inputs that it was exported with.
    args, kwargs = program.example_inputs or ((), {})
    return _Loaded(ProgramModule(program), (tuple(args), dict(kwargs)) if args or kwargs else None)


def _from_file(path: Path, factory: str) -> _Loaded:
    module = _import(path)
    names = [factory] if factory else [name for name in FACTORIES if hasattr(module, name)]
    if not names or not hasattr(module, names[0]):
        missing = factory or " or ".join(FACTORIES)
        raise ModelLoadError(f"{path} defines no function {missing}; it must take no arguments and return the model.")
    value = getattr(module, names[0])
    if not isinstance(value, torch.nn.Module):
        try:
            value = value()
        except Exception as error:
            raise ModelLoadError(f"{path}: {names[0]}() failed: {type(error).__name__}: {error}") from error
    model, inputs = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(model, torch.nn.Module):
        raise ModelLoadError(f"{path}: {names[0]} returns {type(model).__name__}, not an nn.Module.")
    if inputs is None:
        inputs = getattr(module, EXAMPLES, None)
        try:
            inputs = inputs() if callable(inputs) else inputs
        except Exception as error:
            raise ModelLoadError(f"{path}: {EXAMPLES}() failed: {type(error).__name__}: {error}") from error
    return _Loaded(model.eval(), _as_inputs(inputs), root=path.parent.resolve())


def _import(path: Path) -> Any:
    """Imports the file as a module of its own name, with its folder first in ``sys.path``, as for a script."""
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModelLoadError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


# --- inputs, options, mappings --------------------------------------------------------------------------------------


def _as_inputs(value: Any) -> Inputs | None:
    if value is None:
        return None
    if isinstance(value, dict):
        return (), value
    if isinstance(value, (tuple, list)):
        two = len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict)
        return (value[0], value[1]) if two else (tuple(value), {})
    return (value,), {}


def _inputs(loaded: _Loaded, spec: TargetSpec, config: ServingConfig, name: str) -> Inputs:
    if spec.inputs:
        return parse_inputs(spec.inputs)
    warmup = config.openvino.warmup
    # If the YAML declares no inputs, a task may know its own, as image_classifier does.
    worker = worker_of(loaded.handler)
    declared = warmup.inputs or (worker.warmup_inputs() if worker is not None else [])
    inputs = declared_inputs(loaded.model, declared, config) or loaded.inputs
    if inputs is None and warmup.samples and worker is not None and loaded.root is not None:
        ((_, body),) = read_samples(loaded.root, warmup.samples[:1])
        inputs = worker.sample_inputs(body)
    if inputs is None:
        raise ModelLoadError(
            f"the inputs of {name} are unknown: give --input 1,3,224,224, a --config with "
            f"handler.openvino.warmup.inputs, or a function {EXAMPLES} beside the factory."
        )
    return inputs


def _options(config: ServingConfig) -> ResolvedOptions:
    """Returns a worker's options without a cache, which would answer without tracing."""
    resolved, stated = config.backend or resolve_options(None), config.openvino.precision
    if precision.is_open(resolved) and stated not in {"f32", "auto"}:
        resolved = precision.with_precision(resolved, stated, f"{precision.KEY}: {stated}")
    return replace(resolved, options=replace(resolved.options, model_caching=False, cache_dir=None))


def _verification(loaded: _Loaded, config: ServingConfig) -> tuple[VerifySection, Measure | None]:
    """Returns the limits of the YAML and the measure of the archive's task, with the bound that the YAML sets.

    Raises:
        ConfigError: The YAML sets a bound of a measure that the archive's handler does not use.
    """
    verify = config.openvino.verify
    if (worker := worker_of(loaded.handler)) is None:
        # Without its handler, it is not known which measure the model has.
        return verify.model_copy(update={"measure": MeasureSection()}), None
    return verify, with_bounds(worker.measure, verify.measure)


def _notes(loaded: _Loaded, config: ServingConfig) -> Iterator[str]:
    """Yields what the diagnosis does in another way than a worker."""
    if not config.pt2.is_openvino:
        yield (
            f"the backend {config.pt2.backend} cannot be diagnosed: this is the backend openvino with its default "
            "options"
        )
    elif config.openvino.precision == "auto":
        yield _AUTO_NOTE
    if worker_of(loaded.handler) is None and config.openvino.verify.measure.model_dump(exclude_none=True):
        yield f"{MEASURE_KEY} has no effect here: which outputs it is for is known to the archive's handler alone"


# --- inputs of a diagnosis: given on the command line or declared in the YAML, filled with random values ----------


# name=1,3,224,224:float32:0..1; all but the shape is optional.
_NUMBER = r"-?(?:\d+(?:\.\d+)?|\.\d+)"
_INPUT = re.compile(
    r"^(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>scalar|\d+(?:,\d+)*)"
    rf"(?::(?P<dtype>[a-z]\w*))?(?::(?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER}))?$"
)
HELP = "[NAME=]SHAPE[:DTYPE][:LOW..HIGH], such as 1,3,224,224 or ids=1,128:int64:0..30522 (HIGH is exclusive)"


def parse_input(text: str, generator: torch.Generator) -> tuple[str | None, torch.Tensor]:
    """Parses one input of the command line, batch dimension included.

    Args:
        text: ``[NAME=]SHAPE[:DTYPE][:LOW..HIGH]``; ``scalar`` is the shape of a tensor without dimensions.
        generator: Generator of the random values.

    Returns:
        The keyword (None for a positional input) and the tensor.

    Raises:
        ConfigError: The text is not of this form, or LOW is not less than HIGH.
    """
    match = _INPUT.match(text.replace(" ", ""))
    dtype = getattr(torch, match["dtype"] or "float32", None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{text!r} is not an input; write {HELP}.", key="--input")
    scalar = match["shape"] == "scalar"
    sizes = (1,) if scalar else tuple(map(int, match["shape"].split(",")))
    spec = InputSpec(
        name=match["name"] or "input",
        keyword=match["name"] is not None,
        shape=sizes[1:],
        dtype=dtype,
        low=float(match["low"]) if match["low"] else None,
        high=float(match["high"]) if match["high"] else None,
    )
    if spec.low is not None and spec.high is not None and spec.low >= spec.high:
        raise ConfigError(f"{text!r}: {match['low']} must be less than {match['high']}.", key="--input")
    bounds = [bound for bound in (spec.low, spec.high) if bound is not None]
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    if is_whole and not all(bound.is_integer() for bound in bounds):
        raise ConfigError(f"{text!r}: bounds of {dtype} are whole numbers.", key="--input")
    values = spec.make(Signature(sizes[0]), generator)
    return match["name"], values[0] if scalar else values


def parse_inputs(texts: Sequence[str]) -> Inputs:
    """Parses all inputs of the command line; every run gets the same values."""
    generator = torch.Generator().manual_seed(0)
    parsed = [parse_input(text, generator) for text in texts]
    return tuple(value for name, value in parsed if name is None), {name: value for name, value in parsed if name}


def declared_inputs(model: Any, declared: Sequence[WarmupInput], config: ServingConfig) -> Inputs | None:
    """Makes a batch of one as ``handler.openvino.warmup.inputs`` declares it, named dimensions at their largest length.

    Args:
        model: The eager model, for the names of its arguments.
        declared: One entry for each input; if there is none, None is returned.
        config: The settings that the entries belong to.
    """
    if not declared:
        return None
    dims = config.openvino.batching.dims
    largest = {name: sizes[-1] for name, sizes in dims.items()}
    names = parameter_names(model)
    return DeclaredInputs(declared_specs(declared, names), names, dims).make(Signature(1, largest))
