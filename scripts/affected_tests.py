"""Lists the test files that reach what changed since a commit, and why: by imports, or by naming a changed file.

Imports inside functions count, too. A file of another kind than Python's (a YAML file, a page) is reached by those that
name it or its folder. Tests that start servers reach all that the handler and the command line import.

    python scripts/affected_tests.py
    python scripts/affected_tests.py main~3
    python scripts/affected_tests.py --files HEAD
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
# Where a module of a name may lie: unit tests import helpers beside them by their bare names.
_SOURCES = ("handlers", "scripts", "tests", "tests/e2e", "tests/unit/serving")
PACKAGE = "torchserve_openvino"
# Folders of the package with what a test that starts a server runs: handlers, hosts, and commands.
_SERVED = ("entrypoints", "hosts", "cli")
_IGNORED = {"CHANGELOG.md"}


def main(
    since: Annotated[str, typer.Argument(help="A commit; what is not committed counts as changed.")] = "HEAD",
    only_files: Annotated[
        bool, typer.Option("--files", help="Print the test files; the table goes to stderr.")
    ] = False,
) -> None:
    """Lists the test files that reach what changed since a commit, and why.

    Examples: affected_tests.py; affected_tests.py main~3; affected_tests.py --files HEAD
    """
    changed = _changed(since) - _IGNORED
    ways = {test: way for test in _tests() if (way := _way(test, changed)) is not None}
    table = Table("test", "reaches", "through")
    for test, way in ways.items():
        table.add_row(test, way[-1], " > ".join(Path(file).stem for file in way[1:-1]) or "-")
    Console(stderr=only_files).print(table)
    if only_files:
        print(*ways, sep="\n")
    print(f"{len(ways)} of {len(_tests())} test files reach {len(changed)} changed files.", file=sys.stderr)


def _changed(since: str) -> set[str]:
    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(ROOT), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise typer.BadParameter(result.stderr.strip(), param_hint="SINCE")
        return result.stdout.splitlines()

    return {*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")}


@functools.cache
def _tests() -> tuple[str, ...]:
    return tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py")))


def _way(test: str, changed: set[str]) -> list[str] | None:
    """Returns the shortest way from a test to a changed file, both included; None if there is none."""
    came_from: dict[str, str] = {test: ""}
    waiting = deque([test])
    while waiting:
        here = waiting.popleft()
        if here in changed:
            way = [here]
            while came_from[way[-1]]:
                way.append(came_from[way[-1]])
            return way[::-1]
        for file in _reached(here):
            if file not in came_from:
                came_from[file] = here
                waiting.append(file)
    return None


@functools.cache
def _reached(file: str) -> tuple[str, ...]:
    """Returns the files that a file imports or names."""
    path = ROOT / file
    if path.suffix != ".py" or not path.exists():
        return ()
    text = path.read_text(encoding="utf-8")
    imports = dict.fromkeys(_imported(ast.parse(text), path))
    if file.startswith("tests/"):
        imports |= dict.fromkeys(name for name in _others() if _is_named(Path(name), text))
        imports |= dict.fromkeys(_conftests(path))
        if "e2e" in path.parts:
            imports |= dict.fromkeys(_served())
        elif f"{PACKAGE}.cli" in text:
            # A command in a process of its own, too.
            imports |= dict.fromkeys(file for file in _served() if "/cli/" in file)
    imports.pop(file, None)
    return tuple(imports)


@functools.cache
def _served() -> tuple[str, ...]:
    folders = (ROOT / "handlers" / PACKAGE / folder for folder in _SERVED)
    return tuple(str(path.relative_to(ROOT)) for folder in folders for path in sorted(folder.rglob("*.py")))


def _is_named(path: Path, text: str) -> bool:
    return path.name in text or (path.parent != Path() and f'"{path.parent}"' in text)


def _conftests(path: Path) -> Iterator[str]:
    for folder in path.parents:
        if (conftest := folder / "conftest.py").exists() and conftest != path:
            yield str(conftest.relative_to(ROOT))
        if folder == ROOT / "tests":
            return


@functools.cache
def _others() -> tuple[str, ...]:
    """Returns the tracked files that are not Python's, and scripts, which tests run by name."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True)
    return tuple(name for name in listed.stdout.splitlines() if not name.endswith(".py") or name.startswith("scripts/"))


def _imported(tree: ast.AST, path: Path) -> Iterator[str]:
    for node in _run_parts(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            for alias in node.names:
                names += [f"{node.module}.{alias.name}", *_homes_of(node.module, alias.name)]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"tov", PACKAGE}:
            names = _homes_of(PACKAGE, node.attr)
        elif isinstance(node, ast.Constant) and _is_module(node.value) and path.name != "__init__.py":
            # For `python -m`.
            names = [node.value]
        else:
            continue
        for name in names:
            yield from _files_of(name, path.parent)


def _run_parts(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes but those that only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from _run_parts(node)


def _is_module(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(rf"{PACKAGE}(\.\w+)+", value) is not None


def _homes_of(module: str, name: str) -> list[str]:
    """Returns the modules that a name is loaded from when it is first used, from package to package."""
    homes: list[str] = []
    while (home := _homes(module).get(name)) is not None:
        homes.append(home)
        module = home
    return homes


@functools.cache
def _homes(package: str) -> dict[str, str]:
    """Returns the modules of the names that a package loads lazily."""
    path = ROOT.joinpath("handlers", *package.split("."), "__init__.py")
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    values = (n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_HOMES")
    return dict(ast.literal_eval(next(values, ast.Dict([], []))))


def _files_of(module: str, beside: Path) -> Iterator[str]:
    """Yields the files that importing a module runs."""
    parts = module.split(".")
    for source in (beside, *(ROOT / source for source in _SOURCES)):
        for count in range(1, len(parts) + 1):
            base = source.joinpath(*parts[:count])
            for path in (base.with_suffix(".py"), base / "__init__.py"):
                if path.is_file():
                    yield str(path.relative_to(ROOT))


if __name__ == "__main__":
    typer.run(main)
