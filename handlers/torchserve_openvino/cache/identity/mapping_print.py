"""The user's operator mappings as a part of the cache's key."""

from blake3 import blake3

from torchserve_openvino.cache.identity.fingerprint import fingerprint
from torchserve_openvino.cache.identity.key import digest
from torchserve_openvino.ops.mappings import Mappings


def mappings_digest(mappings: Mappings) -> tuple[str, tuple[str, ...]]:
    """Computes a digest of the registered functions and of the content of extension libraries.

    Returns:
        The digest, empty without mappings; and what could not be made part of it: if anything, nothing may be cached.
    """
    if not mappings:
        return "", ()
    unknown: list[str] = []
    content: dict[str, object] = {}
    functions = {**mappings.ops, **{_name(cls): each.convert for cls, each in mappings.modules.items()}}
    for name, convert in functions.items():
        print_ = fingerprint(convert)
        unknown += [f"the mapping of {name} ({what})" for what in print_.unknown]
        content[name] = [print_.code, print_.weights]
    content |= {_name(cls): [content[_name(cls)], each.outputs] for cls, each in mappings.modules.items()}
    for number, library in enumerate(mappings.libraries):
        content[f"library {number} {library.name}"] = blake3(library.read_bytes()).hexdigest()
    return digest(content), tuple(unknown)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
