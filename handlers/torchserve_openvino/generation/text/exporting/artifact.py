"""The exported model as an artifact: found by what it was made of, checked before use, made once."""

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from blake3 import blake3

from torchserve_openvino.cache.identity.key import make_key
from torchserve_openvino.cache.identity.versions import source_digest, versions
from torchserve_openvino.cache.storage.store import Entry, Store
from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.errors import DamagedEntryError
from torchserve_openvino.generation.text.exporting.exported_language_model import CacheShape
from torchserve_openvino.passes.digests import described
from torchserve_openvino.passes.ov.gated_products import split_gated_products

logger = logging.getLogger(__name__)

KIND = "generator"
# Names in the cache, and the names by which OpenVINO GenAI finds them in a folder.
_FILES = {"model.xml": "openvino_model.xml", "model.bin": "openvino_model.bin"}
# What of a Hugging Face folder the exported model depends on.
_SOURCES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


@dataclass(frozen=True)
class Facts:
    """What is known of an exported model besides its files; the body of its entry.

    Attributes:
        layers: What each layer caches.
        vocabulary: How many tokens it knows.
        operators: ATen operators of the exported graph, all of them converted.
        compression: What was chosen for compressed weights, and how many weights have which format.
        kind: The model's type, such as ``llama``.
        bounds: Reasons with the longest sequence, in tokens, for which they do not matter; see `architecture.bounds`.
    """

    layers: tuple[CacheShape, ...]
    vocabulary: int
    operators: int
    compression: Mapping[str, Any]
    kind: str
    bounds: Mapping[str, int]

    def to_plain(self) -> dict[str, Any]:
        """Returns the facts as JSON."""
        return {
            "layers": [list(layer) for layer in self.layers],
            "vocabulary": self.vocabulary,
            "operators": self.operators,
            "compression": dict(self.compression),
            "kind": self.kind,
            "bounds": dict(self.bounds),
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> "Facts":
        """Reads the facts back.

        Raises:
            LookupError, TypeError, ValueError, AttributeError: They are not complete.
        """
        layers = tuple(CacheShape(*map(int, layer)) for layer in plain["layers"])
        bounds = {str(reason): int(bound) for reason, bound in plain["bounds"].items()}
        return cls(
            layers, int(plain["vocabulary"]), int(plain["operators"]), dict(plain["compression"]), str(plain["kind"]),
            bounds,
        )  # fmt: skip


def folder_digest(folder: Path) -> str:
    """Returns the digest of configuration and weights in a Hugging Face folder, by content."""
    digest = blake3(max_threads=blake3.AUTO)
    for path in sorted({path for pattern in _SOURCES for path in folder.glob(pattern)}):
        digest.update(f"{path.name}:{path.stat().st_size};".encode())
        if path.stat().st_size:
            digest.update_mmap(path)
    return digest.hexdigest()


def fields_of(model: str, section: GenerateSection, own: str = "", split: bool = False) -> dict[str, Any]:
    """Returns the fields of an exported model's key.

    Args:
        model: The result of `folder_digest`.
        section: `handler.openvino.generate`.
        own: The checkpoint's own format, if its packed weights are kept.
        split: Whether gated products are kept apart, see `split_gated_products`.
    """
    # bf16 is a precision of computation: OpenVINO rounds the weights while it compiles.
    form = own or ("f32" if section.weights in {"auto", "bf16"} else section.weights)
    return {
        **versions(),
        "exporter": source_digest("generation/text/exporting", "quantized"),
        "transformers": metadata.version("transformers"),
        "model": model,
        "weights": form,
        "compression": [section.group_size, metadata.version("nncf")] if form in {"int8", "int4"} else [],
        "passes": described([split_gated_products]) if split else [],
    }


def load(store: Store | None, fields: Mapping[str, Any]) -> tuple[Entry, Facts] | None:
    """Returns the stored model with these fields; None if there is none, or if it can't be used."""
    if store is None:
        return None
    key = make_key(KIND, fields)
    entry = store.get(KIND, key)
    if entry is None:
        return None
    try:
        return entry, Facts.of_plain(entry.body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        logger.warning("A stored language model cannot be used and is made again: %s", error)
        store.discard(KIND, key)
        return None


def save(store: Store | None, fields: Mapping[str, Any], folder: Path, facts: Facts) -> Entry | None:
    """Stores what `write_model` left in a folder; None if there is no cache, or it cannot be written."""
    if store is None:
        return None
    files = {name: folder / file_name for name, file_name in _FILES.items()}
    return store.put(KIND, make_key(KIND, fields), fields=fields, body=facts.to_plain(), files=files)


def model_path(folder: Path) -> Path:
    """Returns the path of the model in a folder for OpenVINO GenAI."""
    return folder / _FILES["model.xml"]


@contextlib.contextmanager
def as_folder(entry: Entry) -> Iterator[Path]:
    """Yields a folder with the checked files under the names that OpenVINO GenAI expects.

    Raises:
        DamagedEntryError: A file is missing or differs from what was stored.
    """
    with temporary_folder() as folder:
        for name, file_name in _FILES.items():
            source = entry.path(name)
            if not source.is_file():
                raise DamagedEntryError(f"{name} of a stored language model was removed")
            (folder / file_name).symlink_to(source.resolve())
        yield folder


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a folder that only this user can read, removed at the end; a file that is mapped stays usable."""
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as folder:
        yield Path(folder)
