"""Renders the report as plain text."""

from typing import Any

_MOST_KERNELS = 6


def summary_line(report: dict[str, Any]) -> str:
    """Returns one line for the log; ``report`` is `CompileReport.to_dict()`."""
    s = report["summary"]
    kinds: dict[str, int] = {}
    for fallback in report["fallbacks"]:
        kinds[fallback["kind"]] = kinds.get(fallback["kind"], 0) + fallback["count"]
    detail = " (" + ", ".join(f"{kind} {count}" for kind, count in kinds.items()) + ")" if kinds else ""
    return (
        f"coverage {s['coverage']:.1%} ({s['ops_on_openvino']}/{s['ops_total']} ops on OpenVINO), "
        f"{s['graphs']} graph(s), {s['partitions']} partition(s), fallbacks {s['fallbacks']}{detail}, "
        f"graph breaks {s['graph_breaks']}, recompiles {s['recompiles']}, "
        f"compiled in {s['compile_seconds']:.2f} s, device {s['device'] or '?'}, precision {s['precision'] or '?'}"
        + (f" ({shares(precisions)} of the time)" if len(precisions := s.get("precisions", {})) > 1 else "")
        + (f", backend {backend}" if (backend := report["config"].get("backend")) else "")
        + (", not verified" if report["verify"].get("skipped") else "")
    )


def shares(precisions: dict[str, float]) -> str:
    """Returns ``u8 93 %, f32 7 %``."""
    return ", ".join(f"{name} {share:.0%}".replace("%", " %") for name, share in precisions.items())


def products_line(products: dict[str, int]) -> str:
    """Returns ``36 of 37 products with weights in bf16x3, 99.9 % of their multiplications``."""
    total = products.get("multiplications", 0)
    share = products.get("multiplications_bf16x3", 0) / total if total else 0.0
    return (
        f"{products.get('bf16x3', 0)} of {products.get('products', 0)} products with weights in bf16x3, "
        f"{100 * share:.1f} % of their multiplications"
    )


def _first_line(text: str, width: int = 160) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= width else line[: width - 3] + "..."


def verify_line(verify: dict[str, Any]) -> str:
    """Summarises the comparison with eager on one line; ``verify`` is the report's entry of that name."""
    # Requests may be compared even if nothing was compared before READY.
    words = []
    if "passed" in verify:
        words = ["passed" if verify["passed"] else "FAILED", f"{verify.get('cases', '?')} case(s)"]
    if skipped := verify.get("skipped"):
        words.append(f"NOT VERIFIED: {skipped}")
    if sets := verify.get("value_sets"):
        words.append(f"{sets['compared']} set(s) of values")
        if sets["skipped"]:
            words.append(f"{sets['skipped']} skipped")
    # Of values near 0 the relative difference is large, and of outputs that are no classes the first one means nothing:
    # both are in the report's JSON.
    for name in ("max_abs", "cosine", *(("top1_agreement",) if not verify.get("passed") else ())):
        value = verify.get(name)
        if isinstance(value, (int, float)):
            words.append(f"{name.replace('_', ' ')} {value:.3g}" if name.startswith("max") else f"{name} {value:.6g}")
    words += [str(problem) for problem in (verify.get("problems") or [])[:3]]
    for path, part in verify.get("parts", {}).items():
        words.append(f"{path} {'passed' if part.get('passed') else part.get('skipped') or 'FAILED'}")
    if shadow := verify.get("shadow"):
        words.append(
            f"{shadow['checked']} request(s) checked, {shadow['mismatches']} differed, worst {shadow['worst']}"
        )
    return ", ".join(words)


def cache_line(cache: dict[str, Any]) -> str:
    """Summarises what the cache did on one line; ``cache`` is the report's entry of that name."""
    words = [cache["status"], f"{cache['traces']} traced, {cache['compiles']} compiled, {cache['imports']} imported"]
    if verified := cache["verified"]["signatures"]:
        words.append(f"{verified} signature(s) compared with eager")
    if rejected := cache["verified"]["rejected"]:
        words.append(f"{rejected} REJECTED, answers differed")
    if nearest := cache.get("nearest"):
        words.append(f"the nearest entry differs in {', '.join(nearest)}")
    words += list(cache.get("refused", ()))[:3]
    return "; ".join(words)


def render(report: dict[str, Any]) -> str:
    """Returns several lines: summary, graphs with their partitions, then each fallback, break and recompile."""
    lines = ["OpenVINO compile report", "  " + summary_line(report)]
    for graph in report["graphs"]:
        shape = "dynamic" if graph["dynamic"] else "static"
        lines.append(
            f"  graph {graph['index']} [{graph['compile_id']}] {graph['where']}: {graph['stage']}, {shape} shapes"
            f"{' ' + ' '.join(graph['inputs']) if graph.get('inputs') else ''}, "
            f"{graph['ops_on_openvino']}/{graph['ops_total']} ops on OpenVINO, "
            f"lowered in {graph['lower_seconds']:.2f} s"
        )
        for part in graph["partitions"]:
            lines.append(
                f"    {part['name']}: {part['ops']} ops on {part['runs_on']}, {part['inputs']} input(s), "
                f"{part['constants']} constants ({part['constant_bytes'] / 1e6:.1f} MB), "
                f"convert {part['convert_seconds']:.2f} s, compile {part['compile_seconds']:.2f} s"
                + (" (from cache)" if part["from_cache"] else "")
            )
            if products := part.get("products"):
                lines.append(f"      {products_line(products)}")
            if kernels := part.get("kernels"):
                words = [
                    f"{kernel['count']}x {kernel['kind']} {kernel['precision']}" for kernel in kernels[:_MOST_KERNELS]
                ]
                lines.append(f"      kernels, longest first: {', '.join(words)}")
            for layer in part.get("kept_in_floats", ()):
                lines.append(f"      not in 8 bits: {layer['count']}x {layer['op']}: {layer['why']}")
        for name, item in graph.get("decomposed", {}).items():
            into = ", ".join(f"{count}x {op}" for op, count in item["into"].items())
            lines.append(f"    decomposed: {item['count']}x {name} into {into}")
    if outside := report.get("outside"):
        ops = ", ".join(f"{count}x {op}" for op, count in outside.items())
        lines.append(f"  outside any graph, in eager PyTorch: {ops}")
    for title, key in (("fallbacks", "fallbacks"), ("graph breaks", "graph_breaks"), ("recompiles", "recompiles")):
        entries = report[key]
        lines.append(f"  {title}: {'none' if not entries else ''}".rstrip())
        for entry in entries:
            head = " ".join(str(entry[name]) for name in ("kind", "op") if name in entry)
            to = f" -> {entry['to']}" if "to" in entry else ""
            where = f" at {entry['where']}" if entry.get("where") else ""
            lines.append(f"    {entry['count']}x {head}{to}{where}: {_first_line(entry['reason'])}".replace("  :", ":"))
    verify = report.get("verify") or {}
    if verify:
        lines.append(f"  verify: {verify_line(verify)}")
    cache = report.get("cache") or {}
    if cache.get("enabled"):
        lines.append(f"  cache: {cache_line(cache)}")
    for note in report.get("notes", []):
        lines.append(f"  note: {note}")
    return "\n".join(lines)
