"""Converts the structure of a call's inputs and of its result to text, and back."""

from typing import Any

from torch.utils import _pytree as pytree

# For these two, torch's reader would import any module that an entry names.
_IMPORTING = ("collections.defaultdict", "__enum__")


def tree_to_text(spec: Any) -> str:
    """Returns the structure as JSON text.

    Raises:
        ValueError: A container has no name in torch's pytree, or cannot be read back without importing code.
    """
    try:
        text: str = pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        raise ValueError(f"the structure has no text form: {error}") from error
    if text_to_tree(text) != spec:
        raise ValueError("the structure changes when it is written as text: a key that is not a string")
    return text


def text_to_tree(text: str) -> Any:
    """Returns the structure that `tree_to_text` wrote.

    Raises:
        ValueError: The text was not written by it, or names a container that this process does not know.
    """
    for name in _IMPORTING:
        if name in text:
            raise ValueError(f"the structure holds a {name.strip('_')}, which cannot be stored")
    try:
        return pytree.treespec_loads(text)
    except (NotImplementedError, TypeError, KeyError) as error:
        raise ValueError(f"the structure cannot be read: {error}") from error
