"""`torchserve-openvino package`."""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchserve_openvino.cli.console import fail, print_json, stdout, steps
from torchserve_openvino.cli.handler_path import handlers
from torchserve_openvino.cli.reports.tables import show, show_proof
from torchserve_openvino.config.spelling import nearest
from torchserve_openvino.errors import ConfigError, ModelLoadError, PackagingError
from torchserve_openvino.packaging.archive import files_named_by
from torchserve_openvino.packaging.starter import templates
from torchserve_openvino.tasks.catalog import TASKS

if TYPE_CHECKING:
    from torchserve_openvino.packaging.hub_model import HubModel


def package(
    model_name: Annotated[str | None, typer.Option(help="The model's name in TorchServe.", show_default=False)] = None,
    version: Annotated[str | None, typer.Option(help="The model's version.", show_default="1.0")] = None,
    model_file: Annotated[
        Path | None, typer.Option(help="Python file with the model's class.", exists=True, show_default=False)
    ] = None,
    serialized_file: Annotated[
        Path | None,
        typer.Option(help="Weights: a state dict (.pth, .safetensors) or .pt2.", exists=True, show_default=False),
    ] = None,
    hf: Annotated[
        Path | None,
        typer.Option(
            "--hf",
            metavar="FOLDER",
            help="A Hugging Face model, as save_pretrained wrote it; no handler or model file is needed.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="With --hf: a name from `torchserve-openvino tasks`; guessed from config.json without.",
            show_default=False,
        ),
    ] = None,
    timm: Annotated[
        str | None,
        typer.Option(
            "--timm",
            metavar="NAME",
            help="A model of timm, for image_classifier with its own pre-processing; needs --weights.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="With --timm: the weights (.safetensors, or a checkpoint of tensors).",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    handler: Annotated[
        str | None,
        typer.Option(
            help="A handler of this package (tensor by default, see `torchserve-openvino tasks`), or your own file.",
            show_default=False,
        ),
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option(help="model-config.yaml.", exists=True, show_default=False)
    ] = None,
    index_to_name: Annotated[
        Path | None, typer.Option(help="JSON file with the class names.", exists=True, show_default=False)
    ] = None,
    sample: Annotated[
        list[Path] | None,
        typer.Option(help="A sample request, for handler.openvino.warmup.samples; repeatable.", exists=True),
    ] = None,
    extra_files: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE[,FILE...]",
            help="Anything else the handler reads: files and folders, separated by commas; repeatable.",
        ),
    ] = None,
    requirements_file: Annotated[
        Path | None, typer.Option(help="pip requirements of the model.", exists=True, show_default=False)
    ] = None,
    bundle_package: Annotated[
        bool,
        typer.Option(
            "--bundle-package",
            help="Add this package's wheel and a requirements.txt to the archive, for a TorchServe without the package "
            "(install_py_dep_per_model=true).",
        ),
    ] = False,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="int8, int8_weights or int4_weights, instead of handler.openvino.quantize.method.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="With --quantize: a folder of requests, or a .npz file of inputs.", exists=True, show_default=False
        ),
    ] = None,
    made: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="With --quantize: a .pt2 of the model that is quantized already; it is only compared with f32.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    precompile: Annotated[
        bool, typer.Option("--precompile", help="Load the model once and put the compiled graphs into the archive.")
    ] = False,
    level: Annotated[
        list[str] | None,
        typer.Option(help="With --precompile, also compile for any CPU with avx2, avx512, amx ...; repeatable."),
    ] = None,
    tuned: Annotated[
        Path | None,
        typer.Option(
            "--tuned",
            metavar="FOLDER",
            help="What `torchserve-openvino tune` wrote: its archive again, with the configuration that was found.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    export_path: Annotated[Path, typer.Option(help="Folder for the archive.")] = Path("model-store"),
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite an existing archive of this name.")] = False,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check", metavar="FILE", help="Tell whether this .mar starts warm here; if not, why.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Make a .mar with torch-model-archiver, optionally with its compiled graphs inside, or inspect one.

    The same files give the same archive, byte for byte. --check runs no code
    of the archive; its exit code is 0 if it starts warm here, 1 otherwise.

    Examples:

        torchserve-openvino package --model-name cats --model-file model.py --serialized-file w.pth
        --handler image_classifier --config-file model-config.yaml --index-to-name names.json --precompile

        torchserve-openvino package --hf FOLDER --task token-classification --precompile

        torchserve-openvino package --timm resnet10t --weights resnet10t.safetensors

        torchserve-openvino package ... --quantize int8 --calibration photos/

        torchserve-openvino package ... --precompile --level avx2 --level avx512

        torchserve-openvino package --tuned cats-tuned

        torchserve-openvino package --check model-store/cats.mar
    """
    scratch = ExitStack()
    # What the YAML names is beside it, even if another one is written in its place.
    beside = config_file.parent if config_file is not None else Path()
    try:
        if check is not None:
            _check(check, as_json)
            return
        if level and not precompile:
            raise typer.BadParameter("--level needs --precompile.")
        if tuned is not None:
            _alone("--tuned", {
                "--model-name": model_name, "--hf": hf, "--task": task, "--timm": timm, "--weights": weights,
                "--handler": handler, "--model-file": model_file, "--serialized-file": serialized_file,
                "--config-file": config_file, "--index-to-name": index_to_name, "--sample": sample,
                "--extra-files": extra_files, "--requirements-file": requirements_file, "--quantize": quantize,
                "--calibration": calibration, "--from": made, "--version": version,
                "--bundle-package": bundle_package or None,
            })  # fmt: skip
            _tuned(tuned, export_path, force=force, precompiles=precompile, levels=level or [], as_json=as_json)
            return
        named = files_named_by(config_file) if config_file is not None else []
        if (timm is None) != (weights is None):
            raise typer.BadParameter("--timm and --weights belong together.")
        if timm is not None and weights is not None:
            _alone(
                "--timm",
                {
                    "--hf": hf,
                    "--task": task,
                    "--handler": handler,
                    "--model-file": model_file,
                    "--serialized-file": serialized_file,
                },
            )
            folder = Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="torchserve-openvino-")))
            model_file, serialized_file, config_file = _timm(timm, weights, config_file, folder)
            model_name, handler = model_name or timm.replace("/", "-"), "image_classifier"
        pretrained = _pretrained(hf, task, handler, model_file, serialized_file)
        if pretrained is not None:
            model_name = model_name or pretrained.folder.resolve().name
            handler, config_file = pretrained.task.handler, config_file or templates()[pretrained.task.template]
        if not model_name:
            raise typer.BadParameter("give a --model-name to package a model, or a file to --check.")
        if (target := export_path / f"{model_name}.mar").exists() and not force:
            fail(f"{target} exists; replace it with --force.")
        handler_file = _handler(handler or "tensor")
        arguments = ["--version", version or "1.0", "--handler", handler_file]
        for option, path in (
            ("--model-file", model_file),
            ("--serialized-file", serialized_file),
            ("--config-file", config_file),
        ):
            arguments += [option, str(path)] if path is not None else []
        extra = [path for path in (index_to_name, *(sample or ()), *_paths(extra_files or [])) if path is not None]
        if index_to_name is not None and index_to_name.name != "index_to_name.json":
            raise typer.BadParameter(f"the handlers read index_to_name.json; rename {index_to_name.name}.")
        from torchserve_openvino.packaging.build_archive import Quantizing, Recipe, make

        # The archive has one folder: what the command line names wins over a file beside the configuration.
        names = {path.name for path in extra}
        named = [path for path in named if path.name not in names]
        _check_names([model_file, serialized_file, config_file, requirements_file, Path(handler_file), *extra, *named])
        recipe = Recipe(
            model_name, arguments, [*extra, *named], requirements_file,
            bundle_package, precompile, level or [], pretrained,
            Quantizing(quantize, calibration, made, beside),
        )  # fmt: skip
        with steps(lambda text: typer.echo(text, err=True)) as step:
            result = make(recipe, target, step)
    except (ConfigError, ModelLoadError, PackagingError) as error:
        fail(str(error))
    finally:
        scratch.close()
    if as_json:
        print_json(result)
        return
    if pretrained is not None:
        stdout().print(f"task: {pretrained.task.handler} ({pretrained.why})")
    _show(result)


def _show(result: Mapping[str, Any]) -> None:
    console = stdout()
    if result["quantized"] is not None:
        show_proof(result["quantized"], console)
    for line in result["precompiled"]:
        console.print(f"compiled for {line}")
    console.print(f"{result['archive']}: {result['bytes'] / 1e6:.1f} MB")


def _tuned(results: Path, folder: Path, *, force: bool, precompiles: bool, levels: list[str], as_json: bool) -> None:
    from torchserve_openvino.packaging.tuned import pack_tuned

    with steps(lambda text: typer.echo(text, err=True)) as step:
        target = pack_tuned(results, folder, step, force=force, precompiles=precompiles, levels=levels)
    if as_json:
        print_json({"archive": str(target), "bytes": target.stat().st_size})
    else:
        stdout().print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


def _pretrained(
    folder: Path | None, task: str | None, handler: str | None, model_file: Path | None, weights: Path | None
) -> "HubModel | None":
    """Returns the Hugging Face model to package, if any."""
    if folder is None:
        if task is not None:
            raise typer.BadParameter("--task needs --hf; without it, --handler names the task.")
        return None
    _alone("--hf", {"--model-file": model_file, "--serialized-file": weights, "--handler": handler})
    from torchserve_openvino.packaging.hub_model import hub_model

    return hub_model(folder, task)


def _check_names(paths: Sequence[Path | None]) -> None:
    """Checks that no file takes another one's place in the archive's only folder."""
    inside: dict[str, Path] = {}
    for path in paths:
        if path is None or path.is_dir():
            continue
        first = inside.setdefault(path.name, path)
        if first.resolve() != path.resolve():
            raise typer.BadParameter(
                f"{first} and {path} would be one file in the archive, which has one folder: rename one of them."
            )


def _alone(option: str, others: Mapping[str, Any]) -> None:
    for other, value in others.items():
        if value is not None:
            raise typer.BadParameter(
                f"{other} and {option} exclude each other: {option} names the model, which has all of that."
            )


def _timm(name: str, weights: Path, config_file: Path | None, folder: Path) -> tuple[Path, Path, Path]:
    """Writes model.py, weights and model-config.yaml of a timm model, and returns their paths."""
    from torchserve_openvino.packaging.timm_models import write_timm

    start = config_file or templates()[TASKS["image_classifier"].template]
    written = write_timm(name, weights, start, folder, keeps_image=config_file is not None)
    return written.model, written.weights, written.config


def _paths(options: Sequence[str]) -> list[Path]:
    """Returns the files of `--extra-files`, which torch-model-archiver takes separated by commas."""
    names = [name.strip() for option in options for name in option.split(",") if name.strip()]
    for name in names:
        if not Path(name).exists():
            raise typer.BadParameter(f"--extra-files names {name}, which does not exist.")
    return [Path(name) for name in names]


def _handler(name: str) -> str:
    if Path(name).is_file():
        return name
    paths = handlers()
    known = paths.get(name.removesuffix(".py").replace("-", "_"))
    if known is None:
        near = nearest(name, paths)
        hint = f" Did you mean {near!r}?" if near else ""
        raise typer.BadParameter(f"unknown handler {name!r}, and no such file; valid names: {', '.join(paths)}.{hint}")
    return str(known)


def _check(path: Path, as_json: bool) -> None:
    from torchserve_openvino.packaging.inspect import inspect

    verdict = inspect(path)
    if as_json:
        print_json(verdict.to_dict())
    else:
        show(path, verdict)
    if verdict.start != "warm":
        raise typer.Exit(1)
