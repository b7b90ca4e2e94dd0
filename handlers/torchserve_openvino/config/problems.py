"""Collects all problems of a configuration, so that the user fixes them in one go."""

from collections.abc import Callable

from torchserve_openvino.errors import ConfigError

KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """``("warmup", "inputs", 0, "shape")`` as ``warmup.inputs[0].shape``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _line(problem: ConfigError) -> int:
    """Line of a problem, so that they come in the order of the file; 0 where there is none."""
    tail = problem.place.rpartition(":")[2]
    return int(tail) if tail.isdigit() else 0


class ConfigErrors(ConfigError):
    """Several problems of one configuration.

    Attributes:
        problems: One `ConfigError` (or subclass) for each.
    """

    def __init__(self, problems: tuple[ConfigError, ...], *, place: str = "") -> None:
        self.problems = problems
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{len(problems)} problems:{lines}", place=place)


class Problems:
    """A list of errors to be raised at once, each with the key and the place that it concerns.

    Args:
        place_of: Says where a key stands, e.g. ``model-config.yaml:7``.
        prefix: Path that is put before every key.
    """

    def __init__(self, place_of: Callable[[KeyPath], str], prefix: KeyPath = ()) -> None:
        self._place_of = place_of
        self._prefix = prefix
        self._found: list[ConfigError] = []

    def at(self, *keys: str | int) -> "Problems":
        """The same list, seen from a nested key."""
        nested = Problems(self._place_of, self._prefix + keys)
        nested._found = self._found
        return nested

    def place(self, *keys: str | int) -> str:
        """Where a nested key stands."""
        return self._place_of(self._prefix + keys)

    def add(
        self,
        keys: KeyPath,
        message: str,
        *,
        suggestion: str | None = None,
        kind: type[ConfigError] = ConfigError,
    ) -> None:
        """Notes a problem.

        Args:
            keys: Path of the offending key below the prefix.
            message: What is wrong, and how to fix it.
            suggestion: Nearest valid name.
            kind: Error class of this problem.
        """
        path = self._prefix + keys
        self._found.append(kind(message, key=dotted(path), place=self._place_of(path), suggestion=suggestion))

    def __len__(self) -> int:
        return len(self._found)

    def raise_if_any(self, place: str = "") -> None:
        """Raises the only problem as it is, or all of them as `ConfigErrors`.

        Args:
            place: Name of the whole configuration.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise ConfigErrors(tuple(sorted(self._found, key=_line)), place=place)
