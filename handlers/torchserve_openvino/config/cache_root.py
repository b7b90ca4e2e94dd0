"""Where the cache lies if no folder is stated."""

import os
from collections.abc import Mapping
from pathlib import Path

_CACHE_FOLDER = "torchserve-openvino"


def cache_root(env: Mapping[str, str] | None = None) -> Path:
    """Returns the absolute path of the user's cache folder: the default, and the base of a relative ``cache_dir``.

    Args:
        env: Environment variables; ``os.environ`` if None.
    """
    base = Path((os.environ if env is None else env).get("XDG_CACHE_HOME", "")).expanduser()
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / _CACHE_FOLDER
