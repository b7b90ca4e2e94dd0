"""What quantising a model cost and gained, as text."""

from typing import Any

from rich.console import Console
from rich.table import Table


def show_proof(facts: dict[str, Any], console: Console) -> None:
    """Prints accuracy against speed for each version of the model that was tried.

    Args:
        facts: As `QUANTIZED` in the archive holds them.
        console: Where to.
    """
    proof = facts["evaluation"]
    table = Table("in f32", proof["metric"], "drop", "ms", "times f32")
    before = proof["f32_milliseconds"]
    table.add_row("all", f"{proof['f32']:.4f}", "", f"{before:.2f}", "1.00")
    for step in proof["steps"]:
        taken = step["milliseconds"]
        table.add_row(
            f"{step['in_f32']} layers" if step["in_f32"] else "none", f"{step['value']:.4f}", f"{step['drop']:.4f}",
            f"{taken:.2f}", f"{before / taken:.2f}" if taken else "",
        )  # fmt: skip
    console.print(f"quantised by {facts['method']}, compared on {proof['items']} requests{_which(proof)}:")
    console.print(table)
    if proof["in_f32"]:
        console.print(f"left in f32: {', '.join(proof['in_f32'])}")


def _which(proof: dict[str, Any]) -> str:
    """Says whether the requests are those of the calibration; archives of earlier versions don't tell."""
    shared = proof.get("shared")
    if shared is None:
        return ""
    if not shared:
        return ", none of which it was calibrated on"
    some = "the very ones" if shared == proof["items"] else f"{shared} of them"
    return (
        f", {some} that it was calibrated on: the loss on others may be larger; name others in "
        "handler.openvino.quantize.evaluation.data"
    )
