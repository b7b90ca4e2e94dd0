"""Loads what `save_pretrained` wrote into a folder: models, tokenizers, processors; no code in it runs.

Nothing is downloaded.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from torchserve_openvino.errors import ModelLoadError, first_line
from torchserve_openvino.files.contained import OutsideError, contained
from torchserve_openvino.files.json_text import JsonError, read_json, read_json_object
from torchserve_openvino.files.zip_bounds import why_unbounded_file
from torchserve_openvino.quantized.scheme import scheme_of

if TYPE_CHECKING:
    from torch import nn

# Where `torchserve-openvino package --hf` puts the folder in an archive.
FOLDER = "hub"
CONFIG = "config.json"
# Where save_pretrained puts an image processor: by itself, or as part of a processor.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}


def hub_folder(model_dir: Path) -> Path:
    """Returns the folder of the model in an unpacked archive: ``hub``, or the archive itself (``--extra-files``).

    Raises:
        ModelLoadError: There is no config.json in either.
    """
    if (folder := folder_with(model_dir, CONFIG)) is not None:
        return folder
    raise ModelLoadError(
        f"the archive has no {CONFIG} of a Hugging Face model: make it with torchserve-openvino package --hf FOLDER, "
        "or add the files that save_pretrained wrote with --extra-files."
    )


def folder_with(model_dir: Path, name: str) -> Path | None:
    """Returns where an unpacked archive has a file: in ``hub``, or in the archive itself; None if in neither."""
    return next((folder for folder in (model_dir / FOLDER, model_dir) if (folder / name).is_file()), None)


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        ModelLoadError: The file can't be read, or holds no JSON object.
    """
    try:
        return read_json_object(path)
    except (OSError, JsonError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of config.json.

    Raises:
        ModelLoadError: It is missing, no JSON object, or a field that is read here has another type.
    """
    if not (folder / CONFIG).exists():
        raise ModelLoadError(f"{folder} has no {CONFIG}.")
    config = read_object(folder / CONFIG)
    check_fields(config, folder / CONFIG)
    return config


def load_model(folder: Path, loader: str, may_lack: str = "") -> "nn.Module":
    """Loads a model in evaluation mode, in float32 unless its configuration says otherwise.

    Quantized weights (GPTQ, AWQ) become the float32 numbers that they stand for.

    Args:
        folder: What `save_pretrained` wrote.
        loader: A class of transformers, such as ``AutoModelForTokenClassification``.
        may_lack: A submodule that is removed, instead of being random, if the folder has no weights for it.

    Raises:
        ModelLoadError: transformers is not installed, has no such model, weights are missing or do not fit, or they
            are quantized in a way that is not supported.
    """
    scheme = scheme_of(read_config(folder))
    for path in folder.glob("*.bin"):
        if (reason := why_unbounded_file(path)) is not None:
            raise ModelLoadError(f"{path.name} is not read: {reason}.")
    with offline():
        classes = _transformers()
        safe = any(folder.glob("*.safetensors"))
        how = {
            "local_files_only": True, "trust_remote_code": False, "weights_only": True, "output_loading_info": True,
            "ignore_mismatched_sizes": True,
        }  # fmt: skip
        try:
            if scheme is None:
                model, info = getattr(classes, loader).from_pretrained(folder, use_safetensors=safe, **how)
            else:
                # Imported here: it imports torch.
                from torchserve_openvino.serving.loading.packed import load_dequantized

                model, info = load_dequantized(folder, scheme, load_config(folder), getattr(classes, loader), how)
        except ModelLoadError:
            raise
        except Exception as error:
            # Of any class: odd values in config.json go far into transformers.
            raise ModelLoadError(f"{loader} cannot load {folder.name}: {first_line(error)}") from error
    missing = sorted(info.get("missing_keys", ()))
    if may_lack and any(name.startswith(f"{may_lack}.") for name in missing):
        setattr(model, may_lack, None)
        missing = [name for name in missing if not name.startswith(f"{may_lack}.")]
    wrong = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info.get("mismatched_keys", ()))
    if missing or wrong:
        listed = ", ".join((missing + wrong)[:3]) + (", ..." if len(missing + wrong) > 3 else "")
        kind = "no weights for" if missing else "weights of another shape for"
        raise ModelLoadError(
            f"{folder.name} has {kind} {listed}, so {type(model).__name__} would compute with random numbers. Name the "
            "task for which the model was trained."
        )
    _forget_place(model)
    return model.eval()


def without_weights(folder: Path, loader: str) -> "nn.Module":
    """Returns a model with its configuration and its modules, none of which has weights.

    Args:
        folder: What `save_pretrained` wrote; weights are not read.
        loader: As of `load_model`.

    Raises:
        ModelLoadError: transformers is not installed, or has no such model.
    """
    import torch

    config = load_config(folder)
    with offline(), torch.device("meta"):
        try:
            kind = getattr(_transformers(), loader)
            # One class of models is made by calling it.
            model: nn.Module = getattr(kind, "from_config", kind)(config)
        except Exception as error:
            # Of any class, as above.
            raise ModelLoadError(f"{loader} cannot make {folder.name}: {first_line(error)}") from error
    for module in model.modules():
        module._parameters.clear()
        module._buffers.clear()
    _forget_place(model)
    return model.eval()


def load_config(folder: Path) -> Any:
    """Loads a model's configuration, with the defaults of its architecture.

    Raises:
        ModelLoadError: transformers is not installed, or does not know the architecture.
    """
    read_config(folder)
    with offline():
        classes = _transformers()
        try:
            return classes.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            # Of any class, as above.
            raise ModelLoadError(f"{folder / CONFIG} is of no model that can be loaded: {first_line(error)}") from error


def _forget_place(model: "nn.Module") -> None:
    """Removes the folder's path from a model: each registration has another, and the cache would not know it."""
    module: Any
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(module, "name_or_path"):
            module.name_or_path = ""
        if hasattr(config, "_name_or_path"):
            config._name_or_path = ""


def load_tokenizer(folder: Path, *, fast: bool = True) -> Any:
    """Loads a model's tokenizer.

    Args:
        folder: What `save_pretrained` wrote.
        fast: Whether it has to be one in Rust, for offsets and batches.

    Raises:
        ModelLoadError: There is none, or none in Rust though that is needed.
    """
    with offline():
        classes = _transformers()
        try:
            tokenizer = classes.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except Exception as error:
            # Of any class, as above.
            raise ModelLoadError(f"{folder.name} has no tokenizer that can be loaded: {first_line(error)}") from error
    # Without files, transformers makes a tokenizer that knows no words.
    names = tuple(tokenizer.vocab_files_names.values())
    if not any((folder / name).is_file() for name in names):
        raise ModelLoadError(f"{folder.name} has no tokenizer: none of {', '.join(names)} is there.")
    if fast and not tokenizer.is_fast:
        raise ModelLoadError(
            f"{type(tokenizer).__name__} is a tokenizer in Python; save it as tokenizer.json (AutoTokenizer, use_fast)."
        )
    return tokenizer


def load_feature_extractor(folder: Path) -> Any:
    """Loads what turns samples into a model's input: it knows the sampling rate, normalization and spectrograms.

    Raises:
        ModelLoadError: There is none.
    """
    with offline():
        classes = _transformers()
        try:
            return classes.AutoFeatureExtractor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            # Of any class, as above.
            raise ModelLoadError(
                f"{folder.name} has no feature extractor that can be loaded (preprocessor_config.json): "
                f"{first_line(error)}"
            ) from error


def load_image_processor(folder: Path) -> Any:
    """Loads a model's image processor, with Pillow and NumPy instead of torchvision.

    Raises:
        ModelLoadError: There is none, or none that works without torchvision.
    """
    if not any((folder / name).is_file() for name in _PROCESSORS):
        raise ModelLoadError(
            f"{folder.name} has no {_PROCESSORS[0]}, which says how pictures are resized: save the model's image "
            "processor with save_pretrained."
        )
    with offline():
        classes = _transformers()
        try:
            return classes.AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        except Exception as error:
            # Of any class, as above.
            reason = first_line(error)
    torchvision = "torchvision" in str(reason).lower()
    needs = "; it works with torchvision only, which this package does not use" if torchvision else ""
    raise ModelLoadError(f"{folder.name} has no image processor that can be loaded{needs}: {reason}")


@dataclass(frozen=True)
class Pooling:
    """How sentence-transformers makes one vector of a text's tokens.

    Attributes:
        mode: ``mean`` over the tokens, or ``cls``, the first one; of weights of words (SPLADE) ``max`` or ``sum``.
        sparse: Whether the vector has a weight for each word of the vocabulary, most of them 0.
        logarithms: How often a weight becomes ``log(1 + weight)``.
        normalizes: Whether the vector's length becomes 1.
        longest: The longest text in tokens; None if not stated.
        lowers: Whether texts are read in lower case.
        prompt: What stands before each text.
    """

    mode: str = "mean"
    sparse: bool = False
    logarithms: int = 0
    normalizes: bool = False
    longest: int | None = None
    lowers: bool = False
    prompt: str = ""

    def read(self, text: str) -> str:
        """Returns the text that the tokenizer gets."""
        text = (self.prompt + text).strip()
        return text.lower() if self.lowers else text


_DENSE_MODES = {"mean_tokens": "mean", "cls_token": "cls"}
_ACTIVATIONS = {"relu": 1, "log1p_relu": 2}
# Names that sentence-transformers gave to the module with the model.
_ENCODERS = frozenset({"Transformer", "MLMTransformer"})


def is_sparse(folder: Path) -> bool:
    """Returns whether sentence-transformers' files describe a sparse encoder, whose model predicts words."""
    path = folder / "modules.json"
    return path.is_file() and "SpladePooling" in _modules(path)


def pooling_of(folder: Path) -> Pooling:
    """Returns how sentence-transformers' files pool tokens; the mean without such files.

    Raises:
        ModelLoadError: The folder asks for another kind of pooling, or for a module that is not supported.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return Pooling()
    kinds = _modules(path)
    sparse = "SpladePooling" in kinds
    try:
        pooling = read_json_object(contained(folder, kinds["SpladePooling" if sparse else "Pooling"]) / CONFIG)
        # The name has the architecture's, in older folders.
        limits = next(iter(sorted(folder.glob("sentence_*_config.json"))), None)
        texts = read_json_object(limits) if limits is not None else {}
        longest = texts.get("max_seq_length")
        if longest is not None and type(longest) is not int:
            raise TypeError(f"max_seq_length is {longest!r:.100}, not a number of tokens")
        prompt = _prompt_in(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} does not say how tokens are pooled: {error}") from error
    unknown = sorted(kinds.keys() - _ENCODERS - {"SpladePooling" if sparse else "Pooling", "Normalize"})
    if prompt and pooling.get("include_prompt") is False:
        raise ModelLoadError(f"{path} leaves the prompt's own tokens out of the vector; that is not supported.")
    how: dict[str, Any] = {"longest": longest, "lowers": texts.get("do_lower_case") is True, "prompt": prompt}
    if sparse:
        mode, activation = pooling.get("pooling_strategy", "max"), pooling.get("activation_function", "relu")
        if unknown or mode not in {"max", "sum"} or activation not in _ACTIVATIONS:
            unsupported = ", ".join(unknown) or f"{mode!r:.40} and {activation!r:.40}"
            raise ModelLoadError(f"{path} asks for {unsupported}; supported: max, sum, relu, log1p_relu.")
        return Pooling(mode, True, _ACTIVATIONS[activation], "Normalize" in kinds, **how)
    modes = [
        name.removeprefix("pooling_mode_") for name, on in pooling.items() if name.startswith("pooling_mode") and on
    ]
    if unknown or len(modes) != 1 or modes[0] not in _DENSE_MODES:
        raise ModelLoadError(
            f"{path} asks for {', '.join(unknown or modes)}; supported: mean_tokens, cls_token, Normalize, and "
            "SpladePooling."
        )
    return Pooling(_DENSE_MODES[modes[0]], normalizes="Normalize" in kinds, **how)


def _prompt_in(folder: Path) -> str:
    """Returns what stands before each text where a request names no prompt."""
    path = folder / "config_sentence_transformers.json"
    stated = read_json_object(path) if path.is_file() else {}
    name, prompts = stated.get("default_prompt_name"), stated.get("prompts") or {}
    if name is None:
        return ""
    if not isinstance(prompts.get(name), str):
        raise TypeError(f"{path.name} has no prompt {name!r:.100}")
    return str(prompts[name])


def module_folders(folder: Path) -> list[str]:
    """Returns the folders in which sentence-transformers' files describe its modules; none without such files.

    Raises:
        ModelLoadError: They cannot be read, or name a folder outside.
    """
    path = folder / "modules.json"
    names = sorted(set(_modules(path).values()) - {""}) if path.is_file() else []
    for name in names:
        try:
            contained(folder, name)
        except (OutsideError, ValueError, TypeError) as error:
            raise ModelLoadError(f"{path} names {name!r:.100}: {error}") from error
    return names


def _modules(path: Path) -> dict[str, str]:
    """Returns the folders of the modules that modules.json lists, by their kinds."""
    try:
        return {entry["type"].rpartition(".")[2]: entry["path"] for entry in read_json(path)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} does not say how tokens are pooled: {error}") from error


def _transformers() -> Any:
    try:
        # Imported here: it takes seconds, which only workers of these tasks need.
        import transformers
    except ImportError as error:
        raise ModelLoadError(
            f"this task needs transformers ({error}): pip install 'torchserve-openvino[hf]'."
        ) from error
    # A worker's output is TorchServe's log, and a command shows its own progress.
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Keeps the hub's client from the network; a name in a file of the model could otherwise be looked up there."""
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(_OFFLINE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- the fields of a Hugging Face config.json that this package reads itself, and their types ---------------------


class _Fields(BaseModel):
    # transformers checks all others.
    model_config = ConfigDict(strict=True, extra="allow")

    architectures: list[str] | None = None
    model_type: str | None = None
    id2label: dict[str, Any] | None = None
    num_labels: int | None = None
    is_encoder_decoder: bool | None = None
    auto_map: dict[str, Any] | None = None


def check_fields(config: Mapping[str, Any], path: Path) -> None:
    """Checks the content of a config.json.

    Args:
        config: The content.
        path: The file, for messages.

    Raises:
        ModelLoadError: A field has another type; the message names it.
    """
    try:
        _Fields.model_validate(dict(config))
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, error['loc']))}: {error['msg']}, not {error['input']!r:.100}"
            for error in error.errors()
        )
        raise ModelLoadError(f"{path} is not valid: {wrong}.") from error
