"""What is diagnosed: an eager model, one call of it, and the options that it is compiled with."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchserve_openvino.config import ResolvedOptions


class Call(NamedTuple):
    """One call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class TargetSpec:
    """A model as the command line names it, so that another process can load the same one.

    Attributes:
        path: A ``.mar``, a ``.pt2``, ``FILE.py`` or ``FILE.py:NAME``.
        config: A model-config.yaml; None takes that of the archive, or the defaults.
        inputs: One text for each input, as `inputs.parse_input` reads it; empty takes what the model or its YAML tell.
        mappings: Files with operator mappings, beside those that the YAML names.
    """

    path: str
    config: str | None = None
    inputs: tuple[str, ...] = ()
    mappings: tuple[str, ...] = ()


@dataclass
class Target:
    """A loaded model.

    Attributes:
        model: In eager PyTorch, evaluation mode.
        call: The inputs that it is run with.
        options: Of the backend, without any cache.
        name: What it is called on screen.
        config_path: The YAML file that the options came from, where it is a file of the user's.
        root: Folder that the paths of its source lines are shown relative to; None for none.
        keep: What must live as long as the model, such as the folder of an unpacked archive.
    """

    model: Any
    call: Call
    options: ResolvedOptions
    name: str
    config_path: Path | None = None
    root: Path | None = None
    keep: Any = field(default=None, repr=False)
