"""Whether an archive starts warm, as text."""

from pathlib import Path
from typing import TYPE_CHECKING

from torchserve_openvino.cli.console import stdout

if TYPE_CHECKING:
    from torchserve_openvino.packaging.inspect import Verdict


def show(path: Path, verdict: "Verdict") -> None:
    """Prints how an archive starts on this machine, and why."""
    meaning = {
        "warm": "nothing is traced or compiled",
        "from IR": "nothing is traced; OpenVINO compiles",
        "cold": "everything is traced and compiled",
    }
    console = stdout()
    console.print(f"{path}: starts {verdict.start} here ({meaning[verdict.start]})")
    console.print(
        f"  model {verdict.model.get('modelName', '?')} {verdict.model.get('modelVersion', '?')}, "
        f"handler {verdict.model.get('handler', '?')}"
    )
    console.print(
        f"  {verdict.calls} input signature(s), {verdict.partitions} partition(s), {verdict.compiled} compiled for here"
    )
    for reason in verdict.reasons:
        console.print(f"  - {reason}")
