"""Shows a run of the tuner as JSON and as one HTML page that opens offline."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchserve_openvino.bench.machine import machine
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.tune.autoscaling import autoscaling
from torchserve_openvino.tune.candidates import Candidate, ComputeSettings
from torchserve_openvino.tune.effects import effects_of
from torchserve_openvino.tune.keys import KeyPath
from torchserve_openvino.tune.search import Standing
from torchserve_openvino.tune.session import Result
from torchserve_openvino.tune.settings import Settings

_UNITS = {"throughput": "requests/s", "latency": "1/p99 (1/s)", "cost": "requests/s per core"}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 380, 60, 340


def as_json(
    result: Result, name: str, settings: Settings, changed: Mapping[KeyPath, Any], warnings: list[str], cores: int
) -> dict[str, Any]:
    """Returns everything that a run measured, JSON-safe.

    Args:
        result: Of the run.
        name: The model's name.
        settings: Of the run.
        changed: The keys that the choice changes.
        warnings: What makes the result less certain.
        cores: Cores that were used.
    """
    best = result.choice.best
    return {
        "model": name,
        "choice": str(best.candidate) if best else None,
        "present": str(result.present),
        "reason": result.choice.reason,
        "autoscaling": _autoscaling(result),
        "changed": {".".join(path): value for path, value in changed.items()},
        "confirmation": _confirmation(result),
        "claim": str(result.claim) if result.claim else None,
        "warnings": warnings,
        "interrupted": result.interrupted,
        "settings": settings.model_dump(),
        "machine": machine(cores),
        "seconds": round(result.seconds, 1),
        "candidates": [_standing(standing, result) for standing in result.choice.standings],
        "engines": [{"engine": str_of(e), "ms": t} for e, t in result.profile.times.items()],
        "windows": sum(len(trial.windows) for _, trial in result.trials),
        "disturbed": sum(trial.disturbed for _, trial in result.trials),
        "effects": effects_of(result.choice, result.present, result.profile.times),
        "options": result.profile.options,
        "sizes": result.profile.sizes,
        "rejected": [{"engine": str_of(e), "reason": reason} for e, reason in result.profile.rejected.items()],
        "trials": [{"candidate": str(candidate), **vars(trial)} for candidate, trial in result.trials],
    }


def _autoscaling(result: Result) -> dict[str, Any] | None:
    """Returns targets for autoscalers at the winner's lowest rate; None where no rate held."""
    best = result.choice.best
    trials = [trial for candidate, trial in result.trials if best and candidate == best.candidate and trial.rate]
    if best is None or not trials:
        return None
    slowest = min(trials, key=lambda trial: trial.rate)
    medians = [window["p50"] for window in slowest.windows if window["rate"] == slowest.rate and window["p50"]]
    if not medians:
        return None
    return autoscaling(best.candidate, slowest.rate, statistics.median(medians), slowest.ready_seconds)


def _confirmation(result: Result) -> str | None:
    """Returns what the winner's last start showed, as a sentence; None where there was none."""
    if result.unconfirmed:
        return f"Not confirmed: started once more, the winner of the search could not serve. {result.unconfirmed}"
    if result.confirmation is None:
        return None
    if not result.confirmation.rate:
        return "Started once more, the choice held at no rate near the one that the search found."
    return f"Started once more, the choice held {result.confirmation.rate:.1f} requests/s in five windows in a row."


def to_html(facts: Mapping[str, Any]) -> str:
    """Returns the page of a run.

    Args:
        facts: Result of `as_json`.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError("the page needs jinja2: pip install 'torchserve-openvino[tune]'.") from error
    template = (Path(__file__).parent / "page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    sizes = sorted({int(size) for engine in facts["engines"] for size in engine["ms"]})
    by_size = [{int(size): ms for size, ms in engine["ms"].items()} for engine in facts["engines"]]
    headline = f"{facts['reason'][:1].upper()}{facts['reason'][1:]}."
    used = facts["machine"]
    return environment.from_string(template).render(
        name=facts["model"],
        headline=headline,
        choice=facts["choice"] or "none",
        present=facts["present"],
        effects=facts["effects"],
        lengths=[
            {
                "key": lengths["key"],
                "compiled": ", ".join(f"{length:g}" for length in lengths["compiled"]),
                "seen": lengths["summary"],
                "padding": f"{lengths['padding']:.0%}",
            }
            for lengths in facts["sizes"].get("lengths", ())
        ],
        facts=list(filter(None, (facts["confirmation"], facts["claim"], *facts["warnings"], _effort(facts)))),
        unit=_UNITS[facts["settings"]["goal"]],
        plot=_plot(facts),
        rows=[_row(candidate, facts) for candidate in facts["candidates"]],
        sizes=sizes,
        options=facts["options"],
        engines=[
            {"name": engine["engine"], "times": [f"{ms[size]:.1f}" if size in ms else "" for size in sizes]}
            for engine, ms in zip(facts["engines"], by_size, strict=True)
        ],
        rejected=[{"name": entry["engine"], "reason": entry["reason"]} for entry in facts["rejected"]],
        changed="\n".join(f"{key}: {value}" for key, value in facts["changed"].items()),
        machine=f"{used['processor']}, {used['cores']} core(s), {used['system']}; "
        + ", ".join(f"{name} {number}" for name, number in used["versions"].items()),
    )


def _effort(facts: Mapping[str, Any]) -> str:
    return f"Measured for {facts['seconds']:.0f} s: {facts['windows']} windows, {facts['disturbed']} of them disturbed."


def str_of(engine: ComputeSettings) -> str:
    """Returns an engine as tables name it."""
    return ", ".join(map(str, (engine.precision, engine.threads, engine.streams, *engine.options)))


def _standing(standing: Standing[Candidate], result: Result) -> dict[str, Any]:
    trials = [trial for candidate, trial in result.trials if candidate == standing.candidate]
    p99s = sorted(trial.p99_ms for trial in trials if trial.p99_ms is not None)
    predicted = result.predicted.get(standing.candidate)
    return {
        "candidate": str(standing.candidate),
        "score": standing.score if math.isfinite(standing.score) else None,
        "scores": [score if math.isfinite(score) else None for score in standing.scores],
        "ratio": vars(standing.ratio) if standing.ratio else None,
        "left": standing.left,
        "p99_ms": p99s[len(p99s) // 2] if p99s else None,
        "memory": max((trial.memory for trial in trials), default=0),
        "predicted": predicted,
    }


def _row(candidate: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    kind = (
        "best"
        if candidate["candidate"] == facts["choice"]
        else "present"
        if candidate["candidate"] == facts["present"]
        else ""
    )
    ratio = candidate["ratio"]
    return {
        "name": candidate["candidate"],
        "kind": kind,
        "score": f"{candidate['score']:.1f}" if candidate["score"] else "",
        "ratio": f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "",
        "p99": f"{candidate['p99_ms']:.0f}" if candidate["p99_ms"] else "",
        "memory": f"{candidate['memory'] / 1e6:.0f}" if candidate["memory"] else "",
        "predicted": f"{candidate['predicted']:.1f}" if candidate["predicted"] else "",
        "result": candidate["left"] or ("chosen" if kind == "best" else ""),
    }


def _kind(candidate: str, facts: Mapping[str, Any], other: str) -> str:
    return "best" if candidate == facts["choice"] else "present" if candidate == facts["present"] else other


def _state(window: Mapping[str, Any]) -> str:
    result = "held" if window["held"] else "missed the limit"
    return f"{result}; disturbed: {window['disturbed']}" if window["disturbed"] else result


def _ticks(end: float) -> list[float]:
    """Returns four to ten round numbers from 0 up to the end of an axis."""
    magnitude = 10.0 ** math.floor(math.log10(end))
    step = next(part * magnitude for part in (0.1, 0.2, 0.5, 1.0, 2.0) if end / (part * magnitude) < 10)
    return [round(count * step, 6) for count in range(int(end / step + 1e-9) + 1)]


def _plot(facts: Mapping[str, Any]) -> dict[str, Any]:
    points = [
        (trial["candidate"], window)
        for trial in facts["trials"]
        for window in trial["windows"]
        if window["p99"] is not None
    ]
    limit = facts["settings"]["p99"]
    right = max((window["rate"] for _, window in points), default=1.0) * 1.05
    top = min(max((window["p99"] for _, window in points), default=1.0), 3 * limit if limit else math.inf) * 1.05

    def x(rate: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 10) * rate / right, 1)

    def y(latency: float) -> float:
        return round(_BOTTOM - (_BOTTOM - 10) * min(latency, top) / top, 1)

    # Of all windows that held undisturbed: none has both a higher rate and a lower latency.
    front: list[tuple[float, float]] = []
    for _, window in sorted(points, key=lambda point: (-point[1]["rate"], point[1]["p99"])):
        if window["held"] and not window["disturbed"] and (not front or window["p99"] < front[-1][1]):
            front.append((window["rate"], window["p99"]))
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "bottom": _BOTTOM,
        "x_ticks": [{"at": x(tick), "text": f"{tick:g}"} for tick in _ticks(right)],
        "y_ticks": [{"at": y(tick), "text": f"{tick:g}"} for tick in _ticks(top)],
        "limit": y(limit) if limit and limit < top else None,
        "limit_text": f"limit {limit:g} ms" if limit else "",
        "cut": sum(window["p99"] > top for _, window in points),
        "front": " ".join(f"{x(rate)},{y(latency)}" for rate, latency in front),
        "points": [
            {
                "x": x(window["rate"]), "y": y(window["p99"]), "held": window["held"] and not window["disturbed"],
                "kind": _kind(candidate, facts, "other"), "candidate": candidate,
                "title": f"{candidate}: {window['rate']:.1f} requests/s, p99 {window['p99']:.0f} ms, {_state(window)}",
            }
            for candidate, window in points
        ],
    }  # fmt: skip
