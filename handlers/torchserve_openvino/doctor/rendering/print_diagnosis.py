"""Prints a diagnosis as tables for a terminal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Entry = Mapping[str, Any]
Column = tuple[str, Callable[[Entry], str]]
_STYLES = {"openvino": "green", "eager": "yellow", "both": "yellow", "inductor": "yellow"}


def print_diagnosis(diagnosis: Entry, console: Console, *, cpp: bool = False) -> None:
    """Prints the whole diagnosis: the tables first, then what to do next.

    Args:
        diagnosis: Result of `Diagnosis.to_dict`.
        console: The console to print to.
        cpp: Whether to print the files of a translation inside OpenVINO as well.
    """
    console.print(_summary(diagnosis))
    _print(console, "Operators", OPS, diagnosis["ops"], lambda row: _STYLES[row["runs_on"]])
    boxes = [
        {"graph": picture["index"], **box}
        for picture in diagnosis["pictures"]
        for box in picture["boxes"]
        if box["runs_on"] not in {"input", "output"}
    ]
    _print(console, "Time by partition", PARTS, boxes, lambda box: _STYLES[box["runs_on"]])
    parts = [
        {"graph": graph["index"], "part": part}
        for graph in diagnosis["report"]["graphs"]
        for part in graph["partitions"]
    ]
    kernels = [{**part, **kernel} for part in parts for kernel in part["part"].get("kernels", ())]
    _print(console, "Kernels that OpenVINO chose, with their precision", KERNELS, kernels)
    floats = [{**part, **layer} for part in parts for layer in part["part"].get("kept_in_floats", ())]
    _print(console, "Layers that do not compute in 8 bits", KEPT, floats)
    _print(console, "Decomposed before OpenVINO saw them", DECOMPOSED, diagnosis["decomposed"])
    _print(console, "Fallbacks", FALLBACKS, diagnosis["fallbacks"])
    for item in diagnosis["refused"]:
        head = Text.assemble((item["op"], "bold"), f"  {item['count']}x, {item['kind']}: {item['reason']}")
        called = f"{', '.join(item['inputs'])} -> {', '.join(item['outputs'])}"
        _print_item(console, head, item, [called], cpp)
    for item in diagnosis["graph_breaks"]:
        head = Text.assemble(("graph break", "bold"), f"  {item['count']}x: {_brief(item['reason'])}")
        _print_item(console, head, item, [], cpp)
    for title, entries, key in (
        ("OpenVINO's own torch.compile backend", diagnosis["stock"], "text"),
        ("Search for operators that make the answer wrong", diagnosis["bisection"], "explanation"),
    ):
        if entries:
            console.print(Text(f"\n{title}", style="bold"))
            console.print(_indented(Text(entries[key]), 2))
    console.print(_verdict(diagnosis))


def _print_item(console: Console, head: Text, item: Entry, lines: Sequence[str], cpp: bool) -> None:
    console.print()
    console.print(head)
    places: list[str] = item["where"] if isinstance(item["where"], list) else [item["where"]]
    if places and places[0]:
        more = f"  (+{len(places) - 1} more)" if len(places) > 1 else ""
        lines = [f"{places[0]}: {item['source']}{more}", *lines]
    for line in lines:
        console.print(_indented(Text(line, style="dim"), 4))
    for number, step in enumerate(item["next_steps"], start=1):
        mark = (" (tried, works)", "green") if step["proven"] else ""
        console.print(_indented(Text.assemble(f"{number}. {step['title']}", mark), 2))
        console.print(_indented(Text(step["text"]), 5))
        if step["yaml"]:
            console.print(_indented(Text(step["yaml"].rstrip(), style="cyan"), 7))
        if step["mapping"]:
            # Print the function only: --write-mapping writes the whole file and its test.
            console.print(_indented(Text(_mapping_code(step["mapping"]), style="cyan"), 7))
        elif step["kind"] != "upstream" or cpp:
            for name, content in step["files"].items():
                console.print(_indented(Text(f"{name}:", style="bold"), 5))
                console.print(_indented(Text(content.rstrip(), style="cyan"), 7))


def _indented(text: Text, columns: int) -> Padding:
    return Padding(text, (0, 0, 0, columns), expand=False)


def _mapping_code(mapping: Entry) -> str:
    body = mapping["body"] or ["..."]
    head = f'@tov.register_op("{mapping["op"]}")\ndef {mapping["function"]}({mapping["signature"]}):'
    return "\n".join([head, *(f"    {line}" for line in body)])


# --- tables -----------------------------------------------------------------------------------------------------------


def _place(row: Entry) -> str:
    places = row["where"]
    return "-" if not places else places[0] + (f" +{len(places) - 1} more" if len(places) > 1 else "")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {op}" for op, count in counts.items())


def _brief(reason: str) -> str:
    """Returns Dynamo's reason without its hints and links."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    explained = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return ". ".join(part.rstrip(".") for part in (lines[0] if lines else "", explained) if part)


OPS: tuple[Column, ...] = (
    ("operator", lambda row: row["op"]),
    ("count", lambda row: str(row["count"])),
    ("eager ms", lambda row: f"{row['eager_ms']:.3f}"),
    ("share", lambda row: f"{row['share']:.1%}"),
    ("runs on", lambda row: row["runs_on"]),
    ("where", _place),
)
PARTS: tuple[Column, ...] = (
    ("graph", lambda box: str(box["graph"])),
    ("part", lambda box: box["label"]),
    ("runs on", lambda box: box["runs_on"]),
    ("ops", lambda box: str(box["ops"])),
    ("ms", lambda box: f"{box['ms']:.3f}"),
    ("share", lambda box: f"{box['share']:.1%}"),
)
KERNELS: tuple[Column, ...] = (
    ("graph", lambda row: str(row["graph"])),
    ("part", lambda row: row["part"]["name"]),
    ("kernel", lambda row: row["kind"]),
    ("precision", lambda row: row["precision"]),
    ("count", lambda row: str(row["count"])),
    ("ms", lambda row: "-" if row["seconds"] is None else f"{row['seconds'] * 1e3:.3f}"),
)
KEPT: tuple[Column, ...] = (
    ("graph", lambda row: str(row["graph"])),
    ("part", lambda row: row["part"]["name"]),
    ("layer", lambda row: row["op"]),
    ("count", lambda row: str(row["count"])),
    ("why", lambda row: row["why"]),
)
DECOMPOSED: tuple[Column, ...] = (
    ("operator", lambda row: row["op"]),
    ("count", lambda row: str(row["count"])),
    ("into", lambda row: _counts(row["into"])),
)
FALLBACKS: tuple[Column, ...] = (
    ("kind", lambda row: row["kind"]),
    ("what", lambda row: row["op"]),
    ("to", lambda row: row["to"]),
    ("count", lambda row: str(row["count"])),
    ("where", lambda row: row["where"] or "-"),
    ("reason", lambda row: _brief(row["reason"])),
)


def _summary(diagnosis: Entry) -> Table:
    summary, compared = diagnosis["summary"], diagnosis["comparison"]
    table = Table(title=Text(f"Diagnosis of {diagnosis['model']}"), title_justify="left", show_header=False)
    ops = f"{summary['ops_on_openvino']} of {summary['ops_total']} operators on OpenVINO"
    whole = bool(summary["all_on_openvino"])
    rows = [
        ("inputs", ", ".join(diagnosis["inputs"]), ""),
        ("coverage", f"{summary['coverage']:.1%} ({ops})", "green" if whole else "yellow"),
        ("device", f"{summary['device']}, {summary['precision']}", ""),
        ("graphs", f"{summary['graphs']} with {summary['partitions']} partition(s)", ""),
        ("graph breaks", str(summary["graph_breaks"]), "yellow" if summary["graph_breaks"] else "green"),
        ("compile seconds", f"{summary['compile_seconds']:.2f}", ""),
        ("a call", f"{summary['compiled_ms']:.3f} ms, eager {summary['eager_ms']:.3f} ms", ""),
        ("answer", _answer(compared), "red" if compared["verdict"] else "green"),
    ]
    for name, text, style in rows:
        table.add_row(Text(name), Text(text, style=style))
    return table


def _answer(compared: Entry) -> str:
    # Text, where JSON has no such number.
    worst = compared["max_abs"] if isinstance(compared["max_abs"], str) else f"{compared['max_abs']:.2g}"
    return compared["verdict"] or f"as eager's (largest difference {worst})"


def _verdict(diagnosis: Entry) -> Text:
    if diagnosis["healthy"]:
        text, summary = "Everything runs on OpenVINO, and the answer matches eager's.", diagnosis["summary"]
        if summary["eager_ms"] < 0.9 * summary["compiled_ms"]:
            return Text(f"{text} But eager PyTorch is faster here: this model is too small to gain.", style="yellow")
        return Text(text, style="green")
    sentences = [] if diagnosis["summary"]["all_on_openvino"] else ["not everything runs on OpenVINO"]
    if diagnosis["comparison"]["verdict"]:
        hint = "" if diagnosis["bisection"] else " (--bisect finds the operators)"
        sentences.append(f"the answer differs from eager's{hint}")
    if not sentences:
        sentences.append("--bisect compiled it again, and found what the first compilation does not show")
    return Text(f"\n{'; '.join(sentences)}.", style="yellow")


def _print(
    console: Console,
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Entry],
    style: Callable[[Entry], str] = lambda _: "",
) -> None:
    rows = list(rows)
    if not rows:
        return
    table = Table(*(name for name, _ in columns), title=Text(title), title_justify="left")
    for row in rows:
        table.add_row(*(Text(text(row)) for _, text in columns), style=style(row))
    console.print(table)
