"""The house's own rule: imports go one way, and TorchServe stays in serving, tasks and entrypoints."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "handlers" / "torchserve_openvino"
# A room may import from its own floor and from those below.
FLOORS = {
    "cli": 5, "entrypoints": 5, "tasks": 4, "packaging": 4, "doctor": 4, "serving": 3, "backend": 2,
    "ops": 1, "cache": 1, "report": 1, "config": 0, "errors": 0,
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
            assert FLOORS.get(other, 0) <= FLOORS[room(path)], f"{path.name} imports {name}"
        if name.split(".")[0] == "ts":
            assert room(path) in {"serving", "tasks", "entrypoints"}, f"{path.name} imports {name}"


def test_private_modules_of_torch_and_openvino_have_one_door_each() -> None:
    for path in FILES:
        for name in imports(path):
            private = name.startswith(
                ("torch._dynamo", "torch._guards", "torch._functorch", "openvino.frontend.pytorch")
            )
            # stock_worker.py runs OpenVINO's own backend in a process of its own, and watches it from inside.
            torch_doors = {"_torch_kept.py", "_torch_modes.py", "_torch_private.py", "_torch_sizes.py"}
            doors = torch_doors | {"_openvino_private.py", "pt2.py", "stock_worker.py"}
            assert not private or path.name in doors, f"{path}: {name}"


def test_files_can_be_read_in_one_sitting() -> None:
    long = {path.name: n for path in FILES if (n := len(path.read_text(encoding="utf-8").splitlines())) > 330}
    assert not long
