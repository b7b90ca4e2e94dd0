"""Loads an nn.Module from an archive's files: five formats, none of which runs Python code from the weights."""

import importlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from torchserve_openvino.cache.storage.directory import foreign
from torchserve_openvino.config.sections.openvino_section import WeightsSection
from torchserve_openvino.errors import ModelLoadError, class_and_line
from torchserve_openvino.files.atomic import AtomicFile
from torchserve_openvino.files.contained import OutsideError, contained
from torchserve_openvino.files.zip_bounds import why_unbounded
from torchserve_openvino.serving.loading.exported_program import load_program
from torchserve_openvino.serving.loading.labels import own_classes
from torchserve_openvino.serving.loading.select_state import advice, select_state
from torchserve_openvino.serving.loading.torchscript import load_torchscript

# Far above any request that a worker would answer.
MAX_SAMPLE_BYTES = 64 * 2**20

# Keys under which training scripts store a state_dict beside what else they need.
_NESTED = ("state_dict", "model_state_dict")
_SAVE = "save model.state_dict() of the class in the model file."
# Names of the argument that switches an operator to its behavior in training.
_TRAINING_FLAGS = ("train", "training")


class ProgramModule(nn.Module):
    """A torch.export program as a module; train() and eval() have no effect.

    Args:
        program: What ``torch.export.load`` returned.

    Attributes:
        training: Whether the program was exported in training mode, and drops values or takes batch statistics.
    """

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program.module()
        for module in self.modules():
            # A new GraphModule is in training mode, whatever the mode of the program in it.
            module.training = False
        self.training = any(_trains(node) for node in program.graph.nodes)

    def train(self, mode: bool = True) -> "ProgramModule":
        """Does nothing: the program was exported in one mode."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program."""
        return self.program(*args, **kwargs)


def _trains(node: Any) -> bool:
    """Whether a node of a program behaves as in training: its flag says so, and a dropout's probability is not 0."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return False
    positional = zip(schema.arguments, node.args, strict=False)
    arguments = {argument.name: value for argument, value in positional} | node.kwargs
    return arguments.get("p", 1.0) != 0.0 and any(arguments.get(name) is True for name in _TRAINING_FLAGS)


def is_exported(model: nn.Module) -> bool:
    """Whether a model is a torch.export program, or is wrapped around one."""
    return any(isinstance(module, ProgramModule) for module in model.modules())


def may_have_fixed_sizes(model: nn.Module) -> bool:
    """Whether a model is one of those that may accept only the sizes with which they were exported or traced."""
    return any(isinstance(module, (ProgramModule, torch.jit.ScriptModule)) for module in model.modules())


def archive_kind(path: Path) -> str:
    """Returns ``safetensors``, ``torchscript``, ``exported``, ``state_dict`` (other torch.save file) or ``unknown``.

    Raises:
        ModelLoadError: The file is damaged, or inflates to much more than it holds.
    """
    if path.suffix == ".safetensors":
        return "safetensors"
    if not zipfile.is_zipfile(path):
        return "state_dict" if path.suffix in {".pt", ".pth", ".bin"} else "unknown"
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            reason = why_unbounded(path, archive)
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{path.name} is a damaged zip file: {error}.") from error
    if reason is not None:
        raise ModelLoadError(f"{path.name} is not read: {reason}.")
    # Each name begins with a root folder that is named after the file.
    inner = {name.split("/", 1)[-1] for name in names}
    if any(name.startswith("code/") for name in inner):
        return "torchscript"
    if any(name.startswith("models/") for name in inner) or "archive_format" in inner:
        return "exported"
    return "state_dict"


def exported_beside_class(path: Path) -> str:
    """Returns the error message for a torch.export program that is packaged with a model file."""
    return f"{path.name} is a torch.export program: package it without --model-file"


def not_one_class(model_file: str, names: Sequence[str]) -> str:
    """Returns the error message for a model file that defines these classes instead of one."""
    return (
        f"{model_file} must define exactly one class of its own, the model; found {', '.join(names) or 'none'}. "
        f"{one_class_advice(model_file, names)}"
    )


def one_class_advice(file: str, names: Sequence[str]) -> str:
    """Returns what to do with a file that defines these classes instead of one."""
    if names:
        return (
            "TorchServe takes the only class of the file, and could not choose. Move the others into another file, "
            "import them from there, and package that file with --extra-files"
        )
    return (
        f"A class that {file} imports does not count: after `from x import Net`, add `class Mine(Net): pass`, and "
        "package x.py with --extra-files"
    )


def load_without_class(path: Path) -> nn.Module:
    """Loads a file that holds code and weights: a torch.export program, or TorchScript.

    Raises:
        ModelLoadError: The file holds weights only, or cannot be read.
    """
    kind = archive_kind(path)
    if kind == "torchscript":
        return load_torchscript(path)
    if kind != "exported":
        raise ModelLoadError(
            f"{path.name} is no torch.export program (.pt2) and no TorchScript, the two formats that hold a model's "
            f"code{' without a pickle' if kind != 'unknown' else ''}: package the model's class with --model-file "
            "model.py, and its state_dict()."
        )
    return ProgramModule(load_program(path))


def load_class(model_dir: Path, model_file: str) -> nn.Module:
    """Imports the model file from the model's folder and instantiates its only class.

    Raises:
        ModelLoadError: The file is missing, does not define exactly one class, or the class needs arguments.
    """
    if not (model_dir / model_file).is_file():
        raise ModelLoadError(f"the model file {model_file} is not in the archive; package it with --model-file.")
    module = importlib.import_module(Path(model_file).stem)
    classes = own_classes(module)
    if len(classes) != 1:
        raise ModelLoadError(f"{not_one_class(model_file, [cls.__name__ for cls in classes])}.")
    try:
        return classes[0]()
    except TypeError as error:
        raise ModelLoadError(
            f"{classes[0].__name__} in {model_file} cannot be created without arguments ({error}); give them defaults."
        ) from error


def load_weights(model: nn.Module, path: Path, section: WeightsSection | None = None) -> None:
    """Loads weights (torch.save, safetensors, TorchScript) by `load_state_dict`; unpickles tensors only.

    What fits is for that method to say: a class may override it, and hooks rename keys or add those that an older
    version did not store.

    Args:
        model: The model.
        path: The file.
        section: Where the file has the weights; by default, the file as a whole or a usual key.

    Raises:
        ModelLoadError: The file holds something else, or the model does not take it.
    """
    whole = read_state(path)
    section = section or WeightsSection()
    stored = select_state(whole, section, path.name)
    if not isinstance(stored, dict) and type(model).load_state_dict is nn.Module.load_state_dict:
        raise ModelLoadError(f"{path.name} holds a {type(stored).__name__}, not a state_dict: save model.state_dict().")
    # Lightning and many training scripts put the weights under one of these. They come first: a class that ignores
    # what it does not know would load nothing from the file as a whole, and another one takes that instead.
    nested = () if section.key is not None else _NESTED
    inner = [stored[key] for key in nested if isinstance(stored, dict) and isinstance(stored.get(key), dict)][:1]
    refusals: list[Exception] = []
    for state in [*inner, stored]:
        try:
            model.load_state_dict(state)
        except Exception as error:
            # Of any class, as hooks and overrides are the user's code.
            refusals.append(error)
        else:
            return
    reason = _misfit(model, inner[0] if inner else stored, refusals[0])
    better = advice(whole, model.state_dict())
    reason = f"{reason} {better}" if better is not None else f"{reason}{_SAVE if reason.endswith('; ') else ''}"
    raise ModelLoadError(f"{path.name} does not fit {type(model).__name__}: {reason}") from refusals[0]


def _misfit(model: nn.Module, state: Any, error: Exception) -> str:
    """Returns why `load_state_dict` failed, with the keys where they are the reason."""
    text = str(error).strip() or type(error).__name__
    if not isinstance(error, RuntimeError):
        return f"its load_state_dict raises {type(error).__name__}: {text}"
    # torch lists every key, which takes screens for a large model.
    keys = {str(key) for key in state} if isinstance(state, dict) else set()
    own = set(model.state_dict())
    missing = sorted(key for key in own - keys if f'"{key}"' in text)
    unexpected = sorted(key for key in keys - own if f'"{key}"' in text)
    if not missing and not unexpected:
        return text
    return f"{_some('missing', missing)}{_some('unexpected', unexpected)}"


def read_state(path: Path, *, mapped: bool = False) -> Any:
    """Returns what a file of weights holds.

    Args:
        path: The file.
        mapped: Whether tensors are mapped from the file, where its format allows, instead of read into memory.

    Raises:
        ModelLoadError: It is a torch.export program, damaged, or holds something else than tensors and plain values.
    """
    kind = archive_kind(path)
    if kind == "exported":
        raise ModelLoadError(f"{exported_beside_class(path)}.")
    if kind == "torchscript":
        return load_torchscript(path).state_dict()
    if kind == "safetensors":
        try:
            return _read_safetensors(path)
        except SafetensorError as error:
            raise ModelLoadError(f"{path.name} is damaged, or no safetensors file: {error}.") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipfile.is_zipfile(path))
    except Exception as error:
        raise ModelLoadError(
            f"{path.name} cannot be loaded with weights_only=True ({class_and_line(error)}). "
            "Only tensors are read from it, never pickled code: save model.state_dict(), not the model."
        ) from error


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file, tied ones under each of their names: the metadata say what `save_model` left out.

    Source: safetensors/torch.py, `save_model`.
    """
    state = load_file(path)
    with safe_open(path, framework="pt") as file:
        ties = file.metadata() or {}
    return state | {name: state[kept] for name, kept in ties.items() if name not in state and kept in state}


def _some(word: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{word} {shown}; " if names else ""


def private_folder(folder: Path, key: str) -> None:
    """Makes sure that a folder for what clients sent is there, and that nobody else may write to it.

    Args:
        folder: Created for this user alone where it is missing.
        key: The key that names it.

    Raises:
        ModelLoadError: The folder can't be created or written to, or others may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        who = foreign(folder.stat())
        with AtomicFile(folder / ".probe"):
            pass
    except OSError as error:
        raise ModelLoadError(
            f"{key}: {folder} cannot be written to ({error.strerror}); name a folder that this user may write to."
        ) from error
    if who is not None:
        # Requests of clients are in it; and whoever may write to it can plant one that a person then runs.
        raise ModelLoadError(
            f"{key}: {folder} is {who}. Name a folder in it, which is then created for this user alone "
            f"({folder / key.rpartition('.')[2]}), or run `chmod go-w {folder}`."
        )


def archived_file(folder: Path, name: str, key: str) -> Path:
    """Returns a file of an unpacked archive that a key names.

    Args:
        folder: The unpacked archive.
        name: The file.
        key: The key.

    Raises:
        ModelLoadError: It is not in the archive, or leads out of it.
    """
    try:
        path = contained(folder, name)
    except OutsideError as error:
        raise ModelLoadError(f"{key}: {error}; package a copy.") from error
    if not path.is_file():
        raise ModelLoadError(f"{key} names {name!r}, which is not in the archive; package it with --extra-files.")
    return path


def read_samples(folder: Path, names: Sequence[str]) -> list[tuple[str, bytes]]:
    """Reads the files that ``handler.openvino.warmup.samples`` names.

    Raises:
        ModelLoadError: One of them is not in the archive, or leads out of it.
    """
    samples = []
    for name in names:
        path = archived_file(folder, name, "handler.openvino.warmup.samples")
        if (size := path.stat().st_size) > MAX_SAMPLE_BYTES:
            raise ModelLoadError(
                f"handler.openvino.warmup.samples: {name} has {size} bytes, more than a request may have."
            )
        samples.append((name, path.read_bytes()))
    return samples
