"""Layering rules: imports go down only; only serving/torchserve imports TorchServe.

Passes import the one door to private functions, `backend/upstream/`, besides what is below them.
"""

import ast
import graphlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "handlers" / "torchserve_openvino"
# The layer of each subpackage, which may import from its own layer and from those below.
FLOORS = {
    "cli": 8, "tune": 7, "hosts": 7, "adapters": 7, "entrypoints": 7, "tasks": 6, "packaging": 6, "doctor": 6,
    "generation": 5, "serving": 4, "backend": 3, "passes": 2, "ops": 1, "cache": 1, "report": 1, "quantized": 1,
    "frontend": 1, "bench": 1, "config": 0, "files": 0, "errors": 0, "lazy": 0,
}  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


@pytest.mark.parametrize("path", [p for p in FILES if room(p) in FLOORS], ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    for name in imports(path):
        if name.startswith("torchserve_openvino."):
            other = name.split(".")[1]
            if room(path) == "passes" and name.startswith("torchserve_openvino.backend.upstream."):
                continue
            assert FLOORS[other] <= FLOORS[room(path)], f"{path.name} imports {name}"
        if name.split(".")[0] == "ts":
            # A probe looks whether TorchServe still has what that folder relies on.
            rooms = ("serving/torchserve/", "serving/versions/probes.py")
            assert path.relative_to(SOURCE).as_posix().startswith(rooms), f"{path.name} imports {name}"


def test_no_modules_import_each_other() -> None:
    # Which of two such modules can be imported first would depend on who imports them.
    modules = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in FILES}

    def at_the_top(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom) and child.module:
                inner = [f"{child.module}.{alias.name}" for alias in child.names]
                yield from (each if each in modules else child.module for each in inner)
            elif isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                typing_only = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
                yield from () if typing_only else at_the_top(child)

    imported = {
        name: {each for each in at_the_top(ast.parse(path.read_text(encoding="utf-8"))) if each in modules}
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(imported).prepare()


def test_every_subpackage_has_a_layer() -> None:
    assert {room(path) for path in FILES} - {"__init__"} == set(FLOORS)


UPSTREAM = (
    "_openvino_private", "_torch_kept", "_torch_modes", "_torch_private", "_torch_script",
    "_torch_sizes",
)  # fmt: skip
# stock_worker.py observes OpenVINO's own backend from inside, in a separate process.
DOORS = {
    *(f"backend/upstream/{name}.py" for name in UPSTREAM), "config/pt2.py", "doctor/bisecting/stock_worker.py",
}  # fmt: skip


def test_private_modules_of_torch_and_openvino_are_imported_only_in_listed_modules() -> None:
    for path in FILES:
        for name in imports(path):
            private = name.startswith(
                ("torch._dynamo", "torch._guards", "torch._functorch", "openvino.frontend.pytorch")
            )
            assert not private or path.relative_to(SOURCE).as_posix() in DOORS, f"{path}: {name}"


# A stage of the backend may import from itself and from those before it. BESIDE places the modules directly in
# backend/ in this order: "" before all stages, "top" after all.
STAGES = (
    "upstream", "partitioning", "conversion", "runtime", "routes", "torchscript", "capture", "runners",
)  # fmt: skip
BESIDE = {
    "spec": "", "instrumentation": "routes", "backend_settings": "routes",
    "eager_watch": "routes",
    "compiled": "top", "compiler": "top", "entry": "top",
}  # fmt: skip


def test_the_stages_of_the_backend_stand_in_order() -> None:
    for path in (SOURCE / "backend").rglob("*.py"):
        *folder, name = path.relative_to(SOURCE / "backend").parts
        place = folder[0] if folder else BESIDE.get(name.removesuffix(".py"), "top")
        for other in imports(path):
            parts = other.split(".")
            if parts[:2] == ["torchserve_openvino", "backend"] and len(parts) > 2:
                target = parts[2] if parts[2] in STAGES else BESIDE[parts[2]]
                order = ["", *STAGES, "top"]
                assert order.index(target) <= order.index(place), f"{path}: {other}"


def test_the_backend_knows_the_cache_by_its_interface() -> None:
    for path in (SOURCE / "backend").rglob("*.py"):
        names = [other for other in imports(path) if other.startswith("torchserve_openvino.cache")]
        opens = path.name == "compiler.py"
        assert all(
            ".identity" in name or (opens and name.startswith("torchserve_openvino.cache.open")) for name in names
        )


def test_the_architecture_page_says_what_holds() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    (rooms,) = re.findall(r"^    (cli\b.* -> config, files, errors, lazy)$", page, re.MULTILINE)
    floors = [set(re.findall(r"\w+", floor)) for floor in rooms.split("->")]
    assert set.union(*floors) == set(FLOORS)
    for above, below in itertools.pairwise(floors):
        assert min(FLOORS[room] for room in above) >= max(FLOORS[room] for room in below)
    (stages,) = re.findall(r"^    spec.py, upstream -> (.*)$", page, re.MULTILINE)
    assert re.findall(r"\w+(?= ->)", stages) == list(STAGES[1:])
    files = [path.as_posix() for root in ("handlers", "scripts", "tests") for path in (ROOT / root).rglob("*.py")]
    for section in page.split("\n## "):
        named = [*re.findall(r"\w+", section.partition(":")[0].lower()), *re.findall(r"\b(\w+)/", section)]
        rooms = [SOURCE / each for each in named]
        for mentioned in re.findall(r"`([\w/]+\.py)", section):
            # A name without a folder is a file of a room that the section names.
            own = [room for room in rooms if room.is_dir() and "/" not in mentioned]
            places = [path for path in files if not own or any(path.startswith(f"{room}/") for room in own)]
            assert any(path.endswith(f"/{mentioned}") for path in places), mentioned


def test_each_listed_door_is_there() -> None:
    assert [name for name in DOORS if not (SOURCE / name).is_file()] == []
    assert [name for name in BESIDE if not (SOURCE / "backend" / f"{name}.py").is_file()] == []


def test_no_folder_holds_more_than_one_can_overlook() -> None:
    folders = {path.parent for path in FILES}
    assert {
        str(folder.relative_to(SOURCE)): n for folder in folders if (n := len(list(folder.glob("*.py")))) > 25
    } == {}


def test_files_can_be_read_in_one_sitting() -> None:
    long = {path.name: n for path in FILES if (n := len(path.read_text(encoding="utf-8").splitlines())) > 600}
    assert not long


@pytest.mark.parametrize("together", [("unit", "contract", "conformance"), ("e2e",)])
def test_files_of_tests_that_run_together_have_names_of_their_own(together: tuple[str, ...]) -> None:
    # pytest imports them by these names; a second one is an error that only a run of the whole suite shows.
    names = Counter(path.name for kind in together for path in (ROOT / "tests" / kind).rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
