"""Times how long it takes until a fresh process, or a fresh TorchServe worker, gives its first right answer.

Each contender is a new process in its turn, timed from the moment it is started, interpreter and imports included:
raw OpenVINO with a model made ready before (`bare-ir`, `bare-blob`), eager PyTorch, Inductor with a cold and a warm
cache, OpenVINO's own torch.compile backend, and this package with a cold and a warm cache. Every answer is compared
with eager PyTorch's. Quote the ratios. Needs the extras `examples` and `hf`, and a C++ compiler for Inductor.

With --serve also whole servers: from registering EfficientNet-Lite0 to READY, and to the first answer.

    python scripts/benchmarks/startup.py --quick
    python scripts/benchmarks/startup.py --rounds 9 --json startup.json
    python scripts/benchmarks/startup.py --models minilm,minilm-hf --only bare-ir,bare-blob,ours-cold,ours-warm
    python scripts/benchmarks/startup.py --models none --serve --only ours-cold,ours-warm,packaged
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.servers import exit_on_signals
from benchmarks.startups import models, rounds, serve, serve_tables, tables

QUICK_MODELS = ("efficientnet-lite0",)
SLOW = ("inductor-cold", "inductor-warm", serve.TWO)
NAMES = tuple(dict.fromkeys((*rounds.CONTENDERS, *serve.NAMES)))
app = typer.Typer(add_completion=False, rich_markup_mode=None)


# \b keeps the lines of a paragraph as they are.
@app.command(help="\b\n" + (__doc__ or "").replace("\n\n", "\n\n\b\n"))
def main(
    model_names: Annotated[
        str | None,
        typer.Option(
            "--models",
            help=f"Comma-separated: {', '.join(models.SOURCES)}; none times servers alone",
            show_default=",".join(models.DEFAULT),
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help=f"Comma-separated contenders: {', '.join(NAMES)}", show_default="all")
    ] = None,
    count: Annotated[
        int | None, typer.Option("--rounds", help="How often all contenders take turns", min=1, show_default="5")
    ] = None,
    with_servers: Annotated[bool, typer.Option("--serve/--no-serve", help="Also start TorchServes")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="1 round, EfficientNet-Lite0, without what takes longest")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here")] = None,
) -> None:
    default = [name for name in NAMES if not (quick and name in SLOW)]
    contenders = default if only is None else output.chosen(only, NAMES, "--only")
    usual = QUICK_MODELS if quick else models.DEFAULT
    selection = ",".join(usual) if model_names is None else model_names
    names = [] if selection == "none" else output.chosen(selection, models.SOURCES, "--models")
    count = count or (1 if quick else 5)
    exit_on_signals()
    warnings.filterwarnings("ignore")
    raise typer.Exit(run(names, contenders, count, with_servers, json_path))


def byte_compile() -> None:
    """Byte-compiles this checkout, as pip did with the installed packages that it is compared with."""
    import compileall

    import torchserve_openvino

    for folder in (Path(str(torchserve_openvino.__file__)).parent, Path(__file__).resolve().parent):
        compileall.compile_dir(str(folder), quiet=1)


def run(names: list[str], contenders: list[str], count: int, with_servers: bool, json_path: Path | None) -> int:
    """Measures, prints and writes; returns 1 if ours failed, answered wrong, or traced or compiled on a warm start."""
    out = output.results(width=190)
    byte_compile()
    written: dict[str, Any] = {"rounds": count, "models": [], "servers": []}
    bad = False
    in_processes = [name for name in contenders if name in rounds.CONTENDERS]
    for name in names if in_processes else []:
        with tempfile.TemporaryDirectory(prefix="tsov-startup-") as folder:
            results = rounds.Rounds(name, in_processes, Path(folder), output.progress).run(count)
        out.print(tables.process_table(results))
        _print_lines(out, tables.notes(results))
        written["models"].append(tables.as_json(results))
        bad |= tables.problem(results)
    in_servers = [name for name in contenders if name in serve.NAMES]
    if with_servers and in_servers:
        served = _serve(in_servers, count)
        out.print(serve_tables.table(served))
        _print_lines(out, serve_tables.notes(served))
        written["servers"] = serve.as_json(served)
        bad |= serve_tables.problem(served)
    output.write_json(json_path, written)
    return int(bad)


def _serve(names: list[str], count: int) -> list[serve.Served]:
    from benchmarks.servers import photos

    with output.progress.status("what eager PyTorch answers"):
        # The one with the most certain answer.
        photo = max(photos.load(), key=lambda one: one.margin)
    with tempfile.TemporaryDirectory(prefix="tsov-startup-") as folder:
        return serve.Servers(names, photo, Path(folder), output.progress).run(count)


def _print_lines(out: Console, lines: list[str]) -> None:
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
