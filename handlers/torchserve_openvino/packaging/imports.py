"""Finds the modules that the Python files of an archive import and that a worker would not find."""

import ast
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

# Far above any source file; to parse it takes some hundred times as much memory.
_MAX_SOURCE_BYTES = 8 * 2**20


def missing_imports(folder: Path, starts: Iterable[str]) -> Iterator[str]:
    """Yields a sentence for each import that fails, without running any code.

    Imports in functions, in ``try`` and in ``if`` are left out: those may never run, or may be allowed to fail.

    Args:
        folder: The unpacked archive.
        starts: Names of the files that a worker imports first; files of the archive that they import are read, too.
    """
    waiting = list(dict.fromkeys(starts))
    seen = set(waiting)
    while waiting:
        name = waiting.pop(0)
        tree = parse_source(folder / name)
        # Whoever needs this file says what is wrong with it.
        for node in tree.body if isinstance(tree, ast.Module) else ():
            if isinstance(node, ast.ImportFrom) and node.level and "/" not in name:
                yield (
                    f"{name}, line {node.lineno}: relative imports fail in a model archive, whose files are not in a "
                    f"package; write `from {node.module or 'module'} import ...`"
                )
                continue
            for module in _modules(node):
                inside = _file_in(folder, module)
                if inside is not None:
                    if inside not in seen:
                        seen.add(inside)
                        waiting.append(inside)
                elif not _is_installed(module.partition(".")[0]):
                    yield (
                        f"{name}, line {node.lineno}: imports {module}, which is neither in the archive nor installed "
                        f"here; package {module.partition('.')[0]}.py with --extra-files, or name what has to be "
                        "installed with --requirements-file"
                    )


def _modules(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def _file_in(folder: Path, module: str) -> str | None:
    """Returns the archive's file for a module, relative to the folder; None if the archive does not contain it."""
    parts = module.split(".")
    root = folder / parts[0]
    if root.is_dir() and any(root.rglob("*.py")):
        path = folder.joinpath(*parts)
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        return file.relative_to(folder).as_posix()
    return f"{parts[0]}.py" if (folder / f"{parts[0]}.py").is_file() else None


def _is_installed(name: str) -> bool:
    """Returns True if a worker finds a module; the current folder, where the archive is made, does not count."""
    if name in sys.stdlib_module_names or name in sys.builtin_module_names:
        return True
    here = Path.cwd()
    paths = [path for path in sys.path if path and Path(path).resolve() != here]
    for finder in sys.meta_path:
        spec = finder.find_spec(name, paths if finder is PathFinder else None)
        if spec is not None:
            return True
    return False


def parse_source(path: Path) -> ast.Module | str:
    """Returns a Python file's syntax tree, or what is wrong with it."""
    if not path.is_file():
        return "is not in the archive"
    if (size := path.stat().st_size) > _MAX_SOURCE_BYTES:
        return f"has {size} bytes, more than {_MAX_SOURCE_BYTES}, and is no Python file"
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (RecursionError, MemoryError):
        return "is nested too deeply for Python"
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        return f"is not valid Python: {error}"
