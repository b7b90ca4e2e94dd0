"""Strings that name modules, attributes and files point to something."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import setuptools

from fuzzing.mutants import MUTANTS, Mutant
from torchserve_openvino.backend.upstream._torch_private import STAND_IN_FILE
from torchserve_openvino.ops import names

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "handlers" / "torchserve_openvino"
DOTTED = re.compile(r"""["'](torchserve_openvino(?:\.\w+)+)(?::(\w+))?["']""")
FILES = [path for folder in ("handlers", "scripts", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
REFERENCES = sorted({match.groups() for path in FILES for match in DOTTED.finditer(path.read_text(encoding="utf-8"))},
                    key=str)  # fmt: skip


def resolve(dotted: str) -> object:
    """Returns the module, or the attribute of one, that a name with dots means."""
    module, rest = dotted, []
    while not _is_module(module):
        module, _, last = module.rpartition(".")
        rest.insert(0, last)
    try:
        value: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The module is there; an extra that it needs is not.
        assert not str(error.name).startswith("torchserve_openvino")
        pytest.skip(f"{error.name} is not installed")
    for name in rest:
        value = getattr(value, name)
    return value


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(("dotted", "attribute"), REFERENCES, ids=str)
def test_names_of_modules_and_loggers_and_attributes_exist(dotted: str, attribute: str | None) -> None:
    target = resolve(dotted)
    assert attribute is None or hasattr(target, attribute)


IMPORTS = sorted({
    (node.module, alias.name)
    for path in FILES if SOURCE not in path.parents
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchserve_openvino")
    for alias in node.names
})  # fmt: skip
# Code in a text, which another process runs.
_IMPORT = re.compile(r"""(?m)(?:^|["'])\s*from (torchserve_openvino[\w.]*) import (\w+(?:, \w+)*)""")
IN_TEXTS = {
    (module, name)
    for path in FILES
    if SOURCE not in path.parents
    for module, imported in _IMPORT.findall(path.read_text(encoding="utf-8"))
    for name in imported.split(", ")
}


@pytest.mark.parametrize(("module", "name"), sorted({*IMPORTS, *IN_TEXTS}), ids=str)
def test_what_scripts_and_tests_import_exists(module: str, name: str) -> None:
    # mypy reads the package alone, and no quick test imports the benchmarks.
    assert hasattr(resolve(module), name) or _is_module(f"{module}.{name}")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_replaces_what_exists(name: str) -> None:
    mutant: Mutant = MUTANTS[name]
    with mutant.applied():
        pass


def test_package_data_exists() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    (patterns,) = re.findall(r'package_data=\{"torchserve_openvino": \[(.*?)\]\}', text)
    globs = re.findall(r'"(.*?)"', patterns)
    for pattern in globs:
        assert any(SOURCE.glob(pattern)), f"setup.py: package_data {pattern} matches no file"
    packed = {path for pattern in globs for path in SOURCE.glob(pattern)}
    rest = {path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}} - packed
    assert not rest, "setup.py: package_data leaves them out of the wheel"


def test_entry_points_exist() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    targets = re.findall(r"=(torchserve_openvino[\w.]*):(\w+)\"", text)
    assert len(targets) >= 2
    for module, attribute in targets:
        assert hasattr(importlib.import_module(module), attribute), f"{module}:{attribute}"


def test_all_packages_are_found_by_setuptools() -> None:
    packages = {path.parent for path in SOURCE.rglob("*.py")}
    expected = {".".join(path.relative_to(SOURCE.parent).parts) for path in packages}
    assert expected == set(setuptools.find_packages(str(SOURCE.parent)))


def test_files_of_stand_ins_exist() -> None:
    assert (SOURCE.parent / STAND_IN_FILE).is_file()
    for path in names._STAND_INS:
        assert (SOURCE.parent / path).is_file(), path
