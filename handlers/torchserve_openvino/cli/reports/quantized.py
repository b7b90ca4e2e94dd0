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
    console.print(f"quantised by {facts['method']}, compared on {proof['items']} requests:")
    console.print(table)
    if proof["in_f32"]:
        console.print(f"left in f32: {', '.join(proof['in_f32'])}")
