"""`torchserve-openvino doctor MODEL`."""

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchserve_openvino.cli.console import fail, print_json, stdout, steps
from torchserve_openvino.errors import ConfigError, TorchServeOpenVINOError

if TYPE_CHECKING:
    from torchserve_openvino.doctor.diagnosis import Diagnosis
    from torchserve_openvino.doctor.target import TargetSpec

# Exit codes: 0 healthy, 1 error (as for every command), 2 something falls back or differs from eager.
NOT_HEALTHY = 2


def doctor(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A .mar, a .pt2 of torch.export.save, or FILE.py[:NAME] with a function that returns the model "
            "(model, make_model, get_model or build), optionally with example inputs. Its code is run.",
            show_default=False,
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="model-config.yaml: options, warm-up inputs, mappings.", exists=True, show_default=False),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="INPUT",
            help="[NAME=]SHAPE[:DTYPE][:LOW..HIGH] with the batch, such as 1,3,224,224 or ids=1,128:int64:0..30522; "
            "repeatable, in the order of the model's arguments.",
        ),
    ] = None,
    mapping: Annotated[
        list[Path] | None, typer.Option(help="Operator mappings to load (.py or .so); repeatable.", exists=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole diagnosis as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write one page with pictures.", show_default=False)] = None,
    dot: Annotated[Path | None, typer.Option(help="Write the graphs for GraphViz.", show_default=False)] = None,
    write_mapping: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write mappings for the operators that lack one, and test_FILE.", show_default=False
        ),
    ] = None,
    cpp: Annotated[bool, typer.Option("--cpp", help="Print drafts for a translation inside OpenVINO.")] = False,
    stock: Annotated[
        bool, typer.Option("--stock", help="Also report what OpenVINO's own torch.compile backend does.")
    ] = False,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Search for operators that make the answer wrong or OpenVINO fail.")
    ] = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="With --bisect: add them to disabled_ops in the --config file, if that helps."),
    ] = False,
) -> None:
    """Show every operator that does not run on OpenVINO: why, where, how much time it takes, and what helps.

    Exit code 0 if everything runs on OpenVINO and the answer matches eager
    PyTorch's, 2 if something falls back or differs, 1 for errors.

    Examples:

        torchserve-openvino doctor model-store/cats.mar

        torchserve-openvino doctor model.py:make_model --input 1,3,224,224

        torchserve-openvino doctor bert.pt2 --input ids=1,128:int64:0..30522 --html bert.html

        torchserve-openvino doctor model.py --config model-config.yaml --write-mapping my_ops.py

        torchserve-openvino doctor model.py --config model-config.yaml --bisect --write
    """
    from torchserve_openvino.doctor.target import TargetSpec

    try:
        spec = TargetSpec(
            model, str(config) if config else None, tuple(inputs or ()), tuple(str(path) for path in mapping or ())
        )
        if write and not (bisect and config):
            raise ConfigError("--write needs --bisect, and --config with the file to write to.")
        if write_mapping is not None:
            _check_free(write_mapping)
        # The folder of the YAML itself, not of a symbolic link to it.
        written_config = config.resolve() if config is not None and write else None
        _check_files(html, dot, write_mapping, written_config)
        if html is not None or write_mapping is not None:
            _check_templates()
        # Keep what the model prints out of the JSON, and Dynamo's logs off the screen: the diagnosis reports the same.
        with contextlib.redirect_stdout(sys.stderr), _quiet(), steps(lambda _: None) as progress:
            diagnosis = _diagnose(spec, progress, stock=stock, bisect=bisect, written_config=written_config)
    except TorchServeOpenVINOError as error:
        fail(str(error))
    # Printed first: an error while files are written must not lose what took minutes to find.
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        from torchserve_openvino.doctor.rendering.print_diagnosis import print_diagnosis

        print_diagnosis(diagnosis.to_dict(), stdout(), cpp=cpp)
    for note in diagnosis.report["notes"]:
        typer.echo(note, err=True)
    try:
        for note in _write_files(diagnosis, html, dot, write_mapping, config if write else None):
            typer.echo(note, err=True)
    except (TorchServeOpenVINOError, OSError) as error:
        fail(str(error))
    if not diagnosis.healthy:
        raise typer.Exit(NOT_HEALTHY)


def _diagnose(
    spec: "TargetSpec", progress: Callable[[str], None], *, stock: bool, bisect: bool, written_config: Path | None
) -> "Diagnosis":
    from torchserve_openvino.doctor.diagnose import diagnose
    from torchserve_openvino.doctor.target import load_target

    progress("loading the model")
    target = load_target(spec)
    if written_config is not None:
        from torchserve_openvino.doctor.bisecting.yaml_edit import require_disabled_ops

        # After the model, whose file may define operators that the YAML names.
        require_disabled_ops(written_config)
    diagnosis = diagnose(target, progress)
    if stock:
        from torchserve_openvino.doctor.bisecting.stock import what_upstream_does

        progress("trying OpenVINO's own backend")
        verdict = what_upstream_does(spec)
        diagnosis.stock = {**verdict.to_dict(), "text": verdict.text()}
    if bisect and not _can_be_searched(diagnosis):
        diagnosis.report["notes"].append("--bisect has nothing to search: no operator runs on OpenVINO")
    elif bisect:
        from torchserve_openvino.doctor.bisecting.bisect import find_guilty

        # Also if the answer is right so far: the search leaves no small partition in eager PyTorch.
        guilty = find_guilty(
            target.model,
            target.call,
            target.options,
            backend=target.backend,
            judge=target.judge_in(diagnosis.comparison["precision"]),
            dynamic=target.dynamic,
            progress=progress,
        )
        diagnosis.bisection = guilty.to_dict()
    return diagnosis


def _can_be_searched(diagnosis: "Diagnosis") -> bool:
    """Returns True if an operator runs on OpenVINO, or something is wrong that may keep all of them from it."""
    from torchserve_openvino.doctor.bisecting.experiments import FAILURES

    failed = any(fallback["kind"] in FAILURES for fallback in diagnosis.fallbacks)
    return bool(diagnosis.summary["ops_on_openvino"] or diagnosis.comparison["verdict"] or failed)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the warnings of Dynamo and of the backend: the diagnosis reports the same, in order."""
    import torch

    ours = logging.getLogger("torchserve_openvino")
    before = ours.level
    ours.setLevel(logging.ERROR)
    torch._logging.set_logs(all=logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(before)
        torch._logging.set_logs()


def _check_free(path: Path) -> None:
    for file in (path, path.with_name(f"test_{path.name}")):
        if file.exists():
            raise ConfigError(f"{file} exists; write the mappings to another file, or move it away.")
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ConfigError(f"{path} must be a Python file with a plain name, such as my_ops.py.")


def _check_files(*files: Path | None) -> None:
    """Checks that files can be written, before minutes are spent on what they will hold."""
    for file in files:
        if file is None:
            continue
        if not (file.parent.is_dir() and os.access(file.parent, os.W_OK)):
            raise ConfigError(f"{file} cannot be written: {file.parent} is no folder that can be written to.")
        if file.is_dir():
            raise ConfigError(f"{file} cannot be written: it is a folder.")
        if file.exists() and not os.access(file, os.W_OK):
            raise ConfigError(f"{file} cannot be written: it is read-only.")


def _check_templates() -> None:
    """Checks that the templates of pages and mappings can be used.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    from torchserve_openvino.doctor.mapping.skeletons import environment

    environment()


def _write_files(
    diagnosis: "Diagnosis", html: Path | None, dot: Path | None, mapping: Path | None, config: Path | None
) -> Iterator[str]:
    """Writes the files that are not None; yields a note for each."""
    if html is not None:
        from torchserve_openvino.doctor.rendering.picture import to_html

        html.write_text(to_html(diagnosis.to_dict()), encoding="utf-8")
        yield f"{html}: open it in a browser"
    if dot is not None:
        from torchserve_openvino.doctor.rendering.picture import to_dot

        dot.write_text(to_dot(diagnosis.to_dict()), encoding="utf-8")
        yield f"{dot}: dot -Tsvg {dot} > graph.svg"
    if mapping is not None:
        yield _write_mapping(diagnosis, mapping)
    if config is not None:
        yield _disable(config, diagnosis.bisection)


def _write_mapping(diagnosis: "Diagnosis", path: Path) -> str:
    from torchserve_openvino.doctor.mapping.skeletons import mapping_file, mapping_test

    drafts = diagnosis.drafts()
    if not drafts:
        return f"{path}: not written: no operator needs a mapping"
    test = path.with_name(f"test_{path.name}")
    path.write_text(mapping_file(drafts, path.stem), encoding="utf-8")
    open_ones = [draft.op for draft in drafts if not draft.body]
    rest = f"; fill in {', '.join(open_ones)}" if open_ones else ""
    if importlib.util.find_spec("pytest") is None:
        note = f"{test} is not written, as pytest is not installed (pip install pytest)"
        return f"{path}: {len(drafts)} mapping(s){rest}; then doctor with --mapping {path}; {note}"
    test.write_text(mapping_test(drafts, path.stem), encoding="utf-8")
    return f"{path}: {len(drafts)} mapping(s){rest}; then pytest {test}, and doctor with --mapping {path}"


def _disable(config: Path, bisection: dict[str, Any] | None) -> str:
    """Adds the operators to ``disabled_ops``, unless it is not known that this repairs the model."""
    from torchserve_openvino.doctor.bisecting.yaml_edit import add_disabled_ops

    ops = bisection["disabled_ops"] if bisection is not None else []
    if bisection is None or not ops:
        return f"{config}: not changed: --bisect found no operator to disable"
    if not bisection["confirmed"] or ops != bisection["ops"]:
        return f"{config}: not changed: it is not confirmed that disabling {', '.join(ops)} repairs the model"
    diff = add_disabled_ops(config, ops)
    return diff or f"{config}: not changed: {', '.join(ops)} is disabled there already"
