"""Archives with the configuration that `torchserve-openvino tune` found, and with what it was found on."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchserve_openvino.bench.machine import machine
from torchserve_openvino.cache.open import PACKAGED_FOLDER
from torchserve_openvino.config import load_serving_config
from torchserve_openvino.errors import PackagingError
from torchserve_openvino.files.json_text import read_json_object
from torchserve_openvino.packaging.archive import extract, write
from torchserve_openvino.packaging.precompile import check_levels, precompile
from torchserve_openvino.serving.loading.archive_manifest import model_of

# The file in an archive that says what its configuration was tuned on.
TUNED = "tuned.json"
# What the archive keeps of tune.json; the trials stay with the one who ran them.
_KEPT = ("model", "choice", "reason", "confirmation", "claim", "settings", "machine", "changed", "autoscaling")


def pack_tuned(
    results: Path, target_folder: Path, step: Callable[[str], None], *, force: bool,
    precompiles: bool = False, levels: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Writes the archive that was tuned, with the configuration that was found and what it was found on.

    Args:
        results: The folder that `tune` wrote.
        target_folder: Where the archive is written, under its own name.
        step: Gets what is done now, in words.
        force: Whether an archive that is there is overwritten.
        precompiles: Whether compiled graphs are put into the archive; one that has some gets new ones in any case.
        levels: CPU levels to compile for besides.

    Returns:
        Path of the archive.

    Raises:
        PackagingError: The folder is not one of `tune`, or chose nothing; the archive is gone or has no configuration;
            its model is not compiled.
        ConfigError: The configuration is not valid.
    """
    check_levels(levels)
    facts = _facts(results)
    archive = Path(str(facts.get("archive", "")))
    if not archive.is_file():
        raise PackagingError(
            f"{results / 'tune.json'} names the archive {archive}, which is not there; put it back, or tune again."
        )
    config = results / "model-config.yaml"
    if not config.is_file():
        raise PackagingError(f"{results} has no model-config.yaml; tune again.")
    load_serving_config(config)
    with tempfile.TemporaryDirectory(prefix="torchserve-openvino-") as scratch:
        folder = Path(scratch)
        extract(archive, folder)
        model = model_of(folder)
        target = target_folder / f"{model['modelName']}.mar"
        if target.exists() and not force:
            raise PackagingError(f"{target} exists; replace it with --force.")
        if not model.get("configFile"):
            raise PackagingError(f"{archive} has no model-config.yaml to replace.")
        shutil.copyfile(config, folder / model["configFile"])
        recorded = {name: facts[name] for name in _KEPT if name in facts}
        (folder / TUNED).write_text(json.dumps(recorded, indent=1), encoding="utf-8")
        if precompiles or (folder / PACKAGED_FOLDER).is_dir():
            if not levels:
                step("compiling for this CPU; --level names further ones")
            precompile(folder, levels, step)
        write(folder, target)
    return target


def _facts(results: Path) -> dict[str, Any]:
    path = results / "tune.json"
    try:
        facts = read_json_object(path)
    except (OSError, ValueError) as error:
        raise PackagingError(f"{path} cannot be read ({error}); give the folder that `tune` wrote.") from error
    if not facts.get("choice"):
        raise PackagingError(f"{path}: nothing was chosen ({facts.get('reason', 'no reason was kept')}).")
    return facts


def tuned_elsewhere(folder: Path) -> Iterator[str]:
    """Yields how this machine differs from the one that an unpacked archive was tuned on; nothing if it was not tuned.

    Args:
        folder: The unpacked archive.
    """
    path = folder / TUNED
    if not path.is_file():
        return
    try:
        facts = read_json_object(path)
    except (OSError, ValueError) as error:
        yield f"{TUNED} cannot be read: {error}"
        return
    # Imported here: it imports torch.
    from torchserve_openvino.serving.threads import usable_cores

    then, now = facts.get("machine"), machine(usable_cores())
    if not isinstance(then, dict):
        yield f"{TUNED} names no machine"
        return
    stored = then.get("versions")
    versions = stored if isinstance(stored, dict) else {}
    pairs = [("processor", then.get("processor"), now["processor"]), ("cores", then.get("cores"), now["cores"])]
    pairs += [(name, versions.get(name), number) for name, number in now["versions"].items()]
    for name, before, current in pairs:
        if before and current and before != current:
            yield f"tuned with {name} {before}, here it is {current}: run `torchserve-openvino tune` again"
