"""Collects all problems of a configuration, so that the user fixes them in one go."""

from collections.abc import Callable

from torchserve_openvino.errors import ConfigError

KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """Formats ``("warmup", "inputs", 0, "shape")`` as ``warmup.inputs[0].shape``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _line(problem: ConfigError) -> int:
    """Returns the line of a problem, to sort by position in the file; 0 if it has none."""
    tail = problem.location.rpartition(":")[2]
    return int(tail) if tail.isdigit() else 0


class ConfigErrors(ConfigError):
    """Several problems of one configuration.

    Attributes:
        problems: One `ConfigError` (or subclass) for each.
    """

    def __init__(self, problems: tuple[ConfigError, ...], *, location: str = "") -> None:
        self.problems = problems
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{len(problems)} problems:{lines}", location=location)


class Problems:
    """A list of errors to be raised at once, each with its key and the place of that key.

    Args:
        place_of: Returns where a key was set, e.g. ``model-config.yaml:7``.
        prefix: Path prepended to every key.
    """

    def __init__(self, place_of: Callable[[KeyPath], str], prefix: KeyPath = ()) -> None:
        self._place_of = place_of
        self._prefix = prefix
        self._found: list[ConfigError] = []

    def at(self, *keys: str | int) -> "Problems":
        """Returns a view of the same list, with a nested key added to the prefix."""
        nested = Problems(self._place_of, self._prefix + keys)
        nested._found = self._found
        return nested

    def location(self, *keys: str | int) -> str:
        """Returns where a nested key was set."""
        return self._place_of(self._prefix + keys)

    def add(
        self,
        keys: KeyPath,
        message: str,
        *,
        suggestion: str | None = None,
        kind: type[ConfigError] = ConfigError,
    ) -> None:
        """Adds a problem.

        Args:
            keys: Path of the offending key below the prefix.
            message: What is wrong, and how to fix it.
            suggestion: Nearest valid name.
            kind: Error class of this problem.
        """
        path = self._prefix + keys
        self._found.append(kind(message, key=dotted(path), location=self._place_of(path), suggestion=suggestion))

    def __len__(self) -> int:
        return len(self._found)

    def raise_if_any(self, location: str = "") -> None:
        """Raises a single problem as it is, several as one `ConfigErrors`.

        Args:
            location: Name of the whole configuration.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise ConfigErrors(tuple(sorted(self._found, key=_line)), location=location)
