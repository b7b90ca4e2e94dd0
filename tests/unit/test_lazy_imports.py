"""Imports are inside functions only where they defer a heavy import."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "torchserve_openvino"
SOURCE = Path(__file__).resolve().parents[2] / "handlers" / PACKAGE
# Slow or unwanted imports: ts where archives are only inspected; tracing modules in a worker that starts from the
# cache, and sympy behind symbolic sizes; OpenVINO's frontends where nothing is converted; filelock where a cache is
# only read; diffusers, which takes seconds, in all workers but those of image_generator; fsspec, an extra, where a
# cache is in object storage; opentelemetry, an extra, where requests are traced; pydantic, where a model is compiled
# in Python without a configuration or a cache.
HEAVY = {
    "torch", "torch._dynamo", "torch._functorch", "torch._decomp", "torch.export",
    "torch.fx.experimental.symbolic_shapes", "openvino", "openvino.frontend",
    "openvino.torch", "ts", "safetensors", "jinja2", "filelock", "transformers", "timm",
    "openvino_genai", "nncf", "diffusers", "fsspec", "opentelemetry", "pydantic",
}  # fmt: skip
# May be missing, where only functions that the present host does not call need it.
MISSING = {"ts"}
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def file_of(module: str) -> Path | None:
    path = SOURCE.joinpath(*module.split(".")[1:])
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each in TREES), None)


def modules(node: ast.AST) -> list[str]:
    """Returns the modules that an import statement loads; for ``from package import module``, the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return []
    inner = [f"{node.module}.{alias.name}" for alias in node.names]
    return [each if each.startswith(PACKAGE) and file_of(each) else node.module for each in inner]


def at_the_top(tree: ast.AST) -> list[str]:
    found: list[str] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found += modules(node)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            found += [] if typing_only else at_the_top(node)
    return found


def with_packages(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


@functools.cache
def heavy_parts(module: str) -> frozenset[str]:
    """Returns the heavy modules that a module imports, directly or through other modules of this package."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        for each in with_packages(waiting.pop()):
            if each not in seen:
                seen.add(each)
                path = file_of(each) if each.startswith(PACKAGE) else None
                waiting += at_the_top(TREES[path]) if path else []
    return frozenset(seen & HEAVY)


def name_of(path: Path) -> str:
    parts = [PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Commands in cli/ import what they run only when they run, to keep `--help` fast.
@pytest.mark.parametrize(
    "path", [path for path in TREES if path.relative_to(SOURCE).parts[0] != "cli"], ids=lambda path: path.stem
)
def test_imports_inside_functions_spare_something(path: Path) -> None:
    functions = [node for node in ast.walk(TREES[path]) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {module for function in functions for node in ast.walk(function) for module in modules(node)}
    inside = {module for module in inside if module.partition(".")[0] not in MISSING}
    idle = {module for module in inside if not heavy_parts(module) - heavy_parts(name_of(path))}
    assert not idle, "import it at the top"


def test_the_rule_sees_what_it_is_for() -> None:
    assert heavy_parts(f"{PACKAGE}.cache.storage.store") == set()
    assert {"torch", "torch._dynamo"} <= heavy_parts(f"{PACKAGE}.backend.capture.dynamo")
    assert not {"torch._dynamo", "torch.fx.experimental.symbolic_shapes"} & heavy_parts(f"{PACKAGE}.backend.compiler")


def test_importing_the_package_stays_light() -> None:
    code = (
        "import sys, torchserve_openvino as tov; tov.compile; "
        "print([m for m in ('ts', 'transformers', 'torchvision', 'captum', 'pydantic', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_front_process_of_serve_imports_no_library_of_models() -> None:
    assert not {"torch", "openvino", "transformers"} & heavy_parts(f"{PACKAGE}.hosts.serve.server")
