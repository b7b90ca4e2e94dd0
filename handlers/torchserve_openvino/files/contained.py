"""Finds files by names that someone else wrote, within a folder."""

from collections.abc import Sequence
from pathlib import Path


class OutsideError(ValueError):
    """A name that leads out of its folder."""


def contained(folder: Path, name: str, also: Sequence[Path] = ()) -> Path:
    """Returns the path of a file in a folder, which need not exist.

    Args:
        folder: The folder, which may itself be reached through links.
        name: A relative path below it. It may pass through links that stay in the folder.
        also: Further folders to which links may lead.

    Raises:
        OutsideError: It is absolute, or leads out of the folder, by ``..`` or by a link.
    """
    path = folder / name
    try:
        target = path.resolve()
        inside = any(target.is_relative_to(root.resolve()) for root in (folder, *also))
    except (OSError, ValueError, RuntimeError) as error:
        # A link to itself, a name that is too long, a null character.
        raise OutsideError(f"{name[:200]!r} is no path: {error}") from error
    parts = Path(name)
    if not inside or parts.is_absolute() or ".." in parts.parts:
        raise OutsideError(f"{name[:200]!r} leads out of its folder")
    return path
