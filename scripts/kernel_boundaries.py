"""Lists the sizes at which OpenVINO's CPU plugin changes its kernels, and compares both sides with eager PyTorch.

The plugin chooses kernels, fusions and blocks by size. Each form of scripts/boundaries/forms.py has one open size; its
kernels' names, as the runtime model gives them, are compared over all sizes. Exit status 1 means that an answer differs
from eager. What changed against the checked-in list (another version of OpenVINO, another CPU) is printed.

    python scripts/kernel_boundaries.py
    python scripts/kernel_boundaries.py --only "attention: head,softmax" --precisions f32,bf16
    python scripts/kernel_boundaries.py --write
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from boundaries import search
from boundaries.forms import FORMS
from torchserve_openvino.backend.runtime.build import cpu_level, device_capabilities

_LIST = Path(__file__).parents[1] / "tests" / "conformance" / "kernel_boundaries.json"
console = Console(stderr=True)


def main(
    only: Annotated[str, typer.Option(help="Names of forms, comma-separated; all without it.")] = "",
    precisions: Annotated[str, typer.Option(help="f32, bf16 or both; both where the CPU has bf16.")] = "",
    write: Annotated[bool, typer.Option("--write", help="Renew the checked-in list for this CPU.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print boundaries and differences as JSON.")] = False,
) -> None:
    """Lists the sizes at which kernels change, and compares both sides with eager PyTorch.

    Examples: kernel_boundaries.py; kernel_boundaries.py --only softmax --json; kernel_boundaries.py --write
    """
    warnings.filterwarnings("ignore")
    names = [name.strip() for name in only.split(",") if name.strip()] or list(FORMS)
    if unknown := [name for name in names if name not in FORMS]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of: {', '.join(FORMS)}", param_hint="--only")
    hints = [hint for hint in precisions.split(",") if hint] or ["f32", *_bf16()]
    if unknown := [hint for hint in hints if hint not in {"f32", "bf16"}]:
        raise typer.BadParameter(f"{unknown[0]!r} is neither f32 nor bf16", param_hint="--precisions")
    edges: list[search.Boundary] = []
    wrong: list[search.Difference] = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(names) * len(hints))
        for hint in hints:
            for name in names:
                progress.update(task, description=f"{name}, {hint}")
                here = search.boundaries(name, FORMS[name], hint)
                edges += here
                wrong += search.differences(name, FORMS[name], hint, here)
                progress.advance(task)
    if as_json:
        typer.echo(json.dumps({"boundaries": [edge.to_dict() for edge in edges], "wrong": [vars(w) for w in wrong]}))
    else:
        Console().print(_table(edges))
    _print_changes(edges, {(name, hint) for name in names for hint in hints})
    for boundary in wrong:
        console.print(
            f"WRONG: {boundary.form}, {boundary.precision}, size {boundary.size}: "
            f"{boundary.error:.2g} of the largest value",
            style="red",
        )
    if write:
        _write(edges, {(name, hint) for name in names for hint in hints})
    raise typer.Exit(1 if wrong else 0)


def _bf16() -> list[str]:
    return ["bf16"] if "BF16" in device_capabilities("CPU") else []


def _table(edges: list[search.Boundary]) -> Table:
    table = Table("form", "precision", "from size", "kernels before", "kernels from there on")
    for edge in edges:
        before = [kernel for kernel in edge.below if kernel not in edge.above]
        after = [kernel for kernel in edge.above if kernel not in edge.below]
        table.add_row(edge.form, edge.precision, str(edge.size), "\n".join(before), "\n".join(after))
    return table


def _stored() -> dict[str, Any]:
    """Returns the checked-in sizes: by CPU level, then form and precision."""
    return dict(json.loads(_LIST.read_text(encoding="utf-8"))) if _LIST.exists() else {}


def _by_form(edges: list[search.Boundary], ran: set[tuple[str, str]]) -> dict[str, list[int]]:
    return {
        f"{name}, {hint}": [edge.size for edge in edges if (edge.form, edge.precision) == (name, hint)]
        for name, hint in sorted(ran)
    }


def _print_changes(edges: list[search.Boundary], ran: set[tuple[str, str]]) -> None:
    stored = _stored().get(cpu_level())
    if stored is None:
        console.print(f"No list for {cpu_level()} is checked in; --write adds it.")
        return
    for name, sizes in _by_form(edges, ran).items():
        known = stored.get(name, [])
        if new := sorted(set(sizes) - set(known)):
            console.print(f"New: {name}: kernels change at {new}", style="yellow")
        if gone := sorted(set(known) - set(sizes)):
            console.print(f"Gone: {name}: kernels no longer change at {gone}", style="yellow")


def _write(edges: list[search.Boundary], ran: set[tuple[str, str]]) -> None:
    stored = _stored()
    stored[cpu_level()] = dict(sorted({**stored.get(cpu_level(), {}), **_by_form(edges, ran)}.items()))
    _LIST.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
