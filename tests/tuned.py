"""A run of the tuner whose figures are made up: for what shows runs."""

import dataclasses
from typing import Any

from torchserve_openvino.bench.statistics import Interval, claim_quantile
from torchserve_openvino.tune.candidates import Candidate, ComputeSettings, changes
from torchserve_openvino.tune.page import as_json
from torchserve_openvino.tune.profile import Profile
from torchserve_openvino.tune.request_sizes import Lengths, RequestSizes
from torchserve_openvino.tune.search import SearchResult, Standing
from torchserve_openvino.tune.session import Result
from torchserve_openvino.tune.settings import Settings
from torchserve_openvino.tune.trial import Trial

PRESENT = Candidate(ComputeSettings("f32", 2), 1, 1, 1)
BEST = Candidate(ComputeSettings("bf16", 2), 1, 8, 5)
SLOWER = Candidate(ComputeSettings("bf16", 2), 1, 8, 20)
DEAD = Candidate(ComputeSettings("f32", 1), 2, 8, 5)


def window(rate: float, p99: float | None, held: bool, disturbed: str = "") -> dict[str, Any]:
    return {
        "rate": rate, "requests": int(rate * 4), "late": 0 if held else 9, "held": held, "p50": 10.0, "p90": 20.0,
        "p99": p99, "failures": {}, "examples": [], "growing": not held, "disturbed": disturbed, "client_cores": 0.1,
        "server_cores": 1.5, "memory": 400_000_000, "seconds": 4.0,
    }  # fmt: skip


def result() -> Result:
    """A run in which another configuration than the present one wins."""
    trials = [
        (PRESENT, Trial(50.0, 60.0, 400_000_000, 1.5, 8.0, [window(50, 60, True), window(70, 400, False)])),
        (BEST, Trial(120.0, 80.0, 420_000_000, 1.8, 9.0, [
            window(60, 30, True), window(120, 80, True), window(150, 260, False),
            window(130, 90, True, "other processes took 1.20 cores"), window(160, None, False),
        ])),
        (SLOWER, Trial(90.0, 95.0, 420_000_000, 1.8, 9.0, [window(90, 95, True)])),
    ]  # fmt: skip
    standings = [
        Standing(PRESENT, [50.0, 51.0], "slower than the best: 0.42 (0.4 to 0.44)", Interval(0.42, 0.40, 0.44)),
        Standing(BEST, [120.0, 118.0], "", Interval(1.0, 1.0, 1.0)),
        Standing(SLOWER, [90.0, 92.0], "slower than the best: 0.76 (0.72 to 0.8)", Interval(0.76, 0.72, 0.80)),
        Standing(DEAD, [], "it did not become READY: <no memory>"),
    ]
    profile = Profile(
        {
            ComputeSettings("f32", 2): {1: 10.0, 8: 70.0},
            ComputeSettings("bf16", 2): {1: 6.0, 8: 30.0},
            ComputeSettings("f32", 1): {1: 18.0},
        },
        {ComputeSettings("bf16", 1): "wrong answer to a.json: answer.scores differs by 0.3, more than 0.03"},
        options={"text.lengths [16, 64, 128]": "1.9 (1.8 to 2) times as fast (padding 72% before, 8% after)"},
        sizes=RequestSizes([Lengths("text.lengths", [12, 60], [128.0])], [1, 1]).to_plain(),
    )
    choice = SearchResult(standings, standings[1], "better than the present configuration: 2.38 (2.27 to 2.5) times", 7)
    return Result(
        choice, PRESENT, profile, {BEST: 130.0, SLOWER: 100.0, DEAD: 110.0}, trials, trials[1][1],
        claim_quantile(480, 1), 301.0,
    )  # fmt: skip


def facts(**fields: Any) -> dict[str, Any]:
    """The JSON of that run; `fields` of the result may differ."""
    run = dataclasses.replace(result(), **fields)
    best = run.choice.best
    changed = changes(best.candidate, run.present, {}) if best is not None else {}
    return as_json(run, "photos", Settings(p99=100.0), changed, ["only one request is sent <twice>"], 2)
