"""Loads a diffusers pipeline's folder: known classes only, safetensors only, no code from the folder, no network."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchserve_openvino.config.spelling import listed
from torchserve_openvino.errors import ModelLoadError, first_line
from torchserve_openvino.generation.images.families import FAMILIES, INDEX, Family
from torchserve_openvino.serving.loading import hub

_SAFETY = "StableDiffusionSafetyChecker"


@dataclass
class Loaded:
    """What a folder holds.

    Attributes:
        family: The kind of pipeline.
        components: Models, tokenizers and scheduler by name; None for one that the folder leaves out.
        options: Further arguments of the pipelines.
        notes: Remarks for the report.
    """

    family: Family
    components: dict[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def pipeline_folder(model_dir: Path) -> Path:
    """Returns the folder of the pipeline in an unpacked archive: ``hub``, or the archive itself.

    Raises:
        ModelLoadError: There is no model_index.json in either.
    """
    if (folder := hub.folder_with(model_dir, INDEX)) is not None:
        return folder
    raise ModelLoadError(
        f"the archive has no {INDEX} of a diffusers pipeline: make it with torchserve-openvino package --hf FOLDER, "
        "where FOLDER is what pipeline.save_pretrained wrote."
    )


def read_index(folder: Path) -> dict[str, Any]:
    """Returns the content of model_index.json.

    Raises:
        ModelLoadError: It can't be read, or holds no JSON object.
    """
    return hub.read_object(folder / INDEX)


def family_of(index: Mapping[str, Any]) -> Family:
    """Returns the kind of pipeline that a model_index.json names.

    Raises:
        ModelLoadError: It is none that is served.
    """
    name = str(index.get("_class_name"))
    for family in FAMILIES:
        if name in family.pipelines:
            return family
    known = [pipeline for family in FAMILIES for pipeline in family.pipelines]
    raise ModelLoadError(f"{INDEX} names the pipeline {name}, which is not served; served are {listed(known)}.")


def load(folder: Path) -> Loaded:
    """Loads a pipeline's components, in float32 and evaluation mode.

    Raises:
        ModelLoadError: diffusers is not installed, the pipeline is of an unknown kind, a component is missing or of
            another class than its pipeline needs, or its weights are missing, do not fit or are no safetensors.
    """
    index = read_index(folder)
    family = family_of(index)
    loaded = Loaded(family, {}, {name: index[name] for name in family.options if name in index})
    for name, kind in family.models.items():
        class_name = _class_named(index, name)
        if class_name is None and name in family.may_lack:
            loaded.components[name] = None
            continue
        if class_name != kind:
            raise ModelLoadError(f"{INDEX}: {name} is {class_name or 'missing'}; {family.name} needs {kind}.")
        loaded.components[name] = _model(folder / name, kind)
    for name, encoder in family.tokenizers.items():
        model = loaded.components[encoder]
        loaded.components[name] = None if model is None else _tokenizer(folder / name, model)
    loaded.components["scheduler"] = _scheduler(folder / "scheduler", str(_class_named(index, "scheduler")))
    if family.has_safety_checker:
        _add_safety_checker(folder, index, loaded)
    else:
        loaded.notes.append(f"no picture is checked for its content: {family.name} has no safety checker")
    return loaded


def _class_named(index: Mapping[str, Any], name: str) -> str | None:
    """Returns the class that model_index.json names for a component; None if it has none."""
    entry = index.get(name)
    return str(entry[1]) if isinstance(entry, list) and len(entry) == 2 and entry[1] else None


def diffusers() -> Any:
    """Returns the module diffusers.

    Raises:
        ModelLoadError: It is not installed.
    """
    try:
        # Imported here: it takes seconds, which only workers of this task need.
        import diffusers as library
    except ImportError as error:
        raise ModelLoadError(
            f"this task needs diffusers ({error}): pip install 'torchserve-openvino[diffusion]'."
        ) from error
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def _model(folder: Path, kind: str) -> nn.Module:
    if not any(path for path in folder.glob("*.safetensors") if "." not in path.stem):
        raise ModelLoadError(
            f"{folder.name} has no weights as safetensors; save the pipeline with save_pretrained(FOLDER), without a "
            "variant."
        )
    if kind.startswith(("CLIP", "T5")):
        return hub.load_model(folder, kind).float()
    with hub.offline():
        library = diffusers()
        source = library.pipelines.stable_diffusion if kind == _SAFETY else library
        how: dict[str, Any] = {"dtype": torch.float32} if kind == _SAFETY else {"torch_dtype": torch.float32}
        try:
            model, info = getattr(source, kind).from_pretrained(
                folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **how
            )
        except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError) as error:
            text = first_line(error)
            raise ModelLoadError(f"{kind} cannot load {folder.name}: {text}") from error
    if missing := sorted(info.get("missing_keys") or ()):
        raise ModelLoadError(
            f"{folder.name} has no weights for {', '.join(map(str, missing[:3]))}, so {kind} would compute with random "
            "numbers."
        )
    _make_steady(model)
    evaluated: nn.Module = model.eval()
    return evaluated


def _make_steady(model: nn.Module) -> None:
    """Removes from a model of diffusers what differs between processes, so that the cache knows it again.

    Its configuration has the folder's path, and a list in the random order of a set.
    """
    for module in model.modules():
        # A configuration can't be written to.
        register, config = getattr(module, "register_to_config", None), getattr(module, "config", {})
        if register is not None:
            known = {"_name_or_path": "", "_use_default_values": sorted(config.get("_use_default_values", ()))}
            register(**{name: value for name, value in known.items() if name in config})


def _tokenizer(folder: Path, encoder: Any) -> Any:
    tokenizer = hub.load_tokenizer(folder)
    # A tokenizer's file may lack its limit; T5 has none of its own.
    limit = getattr(encoder.config, "max_position_embeddings", None)
    if limit is not None:
        tokenizer.model_max_length = min(int(tokenizer.model_max_length), int(limit))
    return tokenizer


def _scheduler(folder: Path, kind: str) -> Any:
    library = diffusers()
    scheduler: Any = getattr(library, kind, None)
    if library.SchedulerMixin not in getattr(scheduler, "__mro__", ()):
        raise ModelLoadError(f"{INDEX} names the scheduler {kind}, which diffusers does not have.")
    with hub.offline():
        try:
            return scheduler.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            raise ModelLoadError(f"{kind} cannot load {folder.name}: {error}") from error


def _add_safety_checker(folder: Path, index: Mapping[str, Any], loaded: Loaded) -> None:
    kind = _class_named(index, "safety_checker")
    if kind is None:
        loaded.notes.append("no picture is checked for its content: the folder has no safety checker")
        return
    if kind != _SAFETY:
        raise ModelLoadError(f"{INDEX} names the safety checker {kind}; {_SAFETY} is the one that is known.")
    loaded.components["safety_checker"] = _model(folder / "safety_checker", kind)
    loaded.components["feature_extractor"] = hub.load_image_processor(folder / "feature_extractor")
    loaded.notes.append("each picture is checked by the folder's safety checker; one that it flags is not sent")
