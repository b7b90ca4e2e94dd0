"""Compiled lengths that fit the requests: for distributions whose best lengths are known."""

import itertools
import json
import random
from typing import Any

import pytest
import yaml

from torchserve_openvino.bench.statistics import Interval
from torchserve_openvino.config import load_serving_config
from torchserve_openvino.tune.candidates import Candidate, ComputeSettings, changes
from torchserve_openvino.tune.keys import OPENVINO, with_changes
from torchserve_openvino.tune.offered_options import Option, worth_taking
from torchserve_openvino.tune.request_sizes import MODE, Lengths, RequestSizes, fitted_lengths

TEXT = yaml.safe_load("pt2: {compile: {enable: true, backend: openvino}}")


def text(seen: list[int], compiled: list[float], **fields: Any) -> RequestSizes:
    return RequestSizes([Lengths("text.lengths", seen, compiled)], [1] * len(seen), **fields)


def padded(seen: list[int], compiled: list[int]) -> int:
    return sum(min(each for each in compiled if each >= length) - length for length in seen)


def test_two_groups_of_lengths_get_two_lengths_without_padding() -> None:
    assert fitted_lengths([16] * 90 + [160] * 10, 2, 512) == [16, 160, 320, 512]
    # With one length for all, the short ones are padded.
    assert fitted_lengths([16] * 90 + [160] * 10, 1, 512) == [160, 320, 512]


@pytest.mark.parametrize("seed", range(5))
def test_no_other_lengths_pad_less(seed: int) -> None:
    rng = random.Random(seed)
    seen = [rng.randint(1, 20) for _ in range(60)]
    chosen = fitted_lengths(seen, 3, 40)
    others = itertools.combinations(range(1, 21), 3)
    assert len(chosen) == 4 and chosen[-1] == 40
    assert padded(seen, chosen) == min(padded(seen, [*each, 40]) for each in others if each[-1] == max(seen))


def test_the_longest_accepted_length_stays_and_lengths_that_were_not_seen_are_covered() -> None:
    assert fitted_lengths([5, 6, 7], 2, 512)[-1] == 512
    chosen = fitted_lengths([40] * 10, 4, 512)
    assert chosen == [40, 80, 160, 320, 512]
    assert fitted_lengths([], 4, 128) == [128]
    # A length beyond the longest one is that of a text that is cut.
    assert fitted_lengths([700], 1, 512) == [512]


def test_many_different_lengths_are_chosen_among_in_time() -> None:
    chosen = fitted_lengths(range(1, 5000), 8, 5000, steps=5000)
    assert chosen[-1] == 5000 and len(chosen) <= 9
    assert padded(list(range(1, 5000)), chosen) / sum(range(1, 5000)) < 0.15


def test_padding_is_the_share_that_is_computed_for_nothing() -> None:
    lengths = Lengths("text.lengths", [10, 30], [40.0, 128.0])
    assert lengths.padding([40, 128]) == pytest.approx(0.5)
    assert lengths.padding([10, 30]) == 0
    assert lengths.summary() == "2 rows of length 10 to 30, median 30, 90 % up to 30"


def test_lengths_are_offered_with_what_was_seen_and_what_they_save() -> None:
    options = text([12] * 50 + [60] * 50, [128.0]).options([2])
    shown = {str(option): option.why for option in options}
    assert set(shown) == {
        "text.lengths [12, 60, 120, 128]",
        "text.lengths [12, 60, 120, 128], one_graph false",
        'batching.mode "dynamic"',
    }
    assert shown["text.lengths [12, 60, 120, 128]"] == (
        "100 rows of length 12 to 60, median 60, 90 % up to 60; padding 72% before, 0% after"
    )


def test_lengths_that_end_within_a_second_stay() -> None:
    # Fitted lengths are whole: 7 in the place of 7.5 would refuse a recording of 7.2 s.
    for longest, offered in ((7.5, False), (7.0, True)):
        options = text([1, 2, 2, 3] * 10, [2.5, 5.0, longest]).options()
        assert any(option.path[-1] == "lengths" for option in options) is offered


def test_what_saves_nothing_is_not_offered() -> None:
    # All are as long as the only compiled length.
    assert text([128] * 20, [128.0]).options() == []
    # Lengths differ, and the present ones fit already: at most fewer of them, each with a graph, or none.
    names = [str(option) for option in text([16, 32] * 20, [16.0, 32.0, 512.0]).options([2])]
    assert names == ["text.lengths [16, 32, 64, 128, 256, 512], one_graph false", 'batching.mode "dynamic"']
    assert text([12, 60], [128.0]).options([]) == []


def test_a_dynamic_configuration_is_compared_with_lengths_and_an_exact_one_stays() -> None:
    options = text([12, 60] * 10, [128.0], mode="dynamic").options([2])
    assert next(option.changes for option in options) == {
        ("handler", "openvino", "text", "lengths"): [12, 60, 120, 128],
        ("handler", "openvino", "batching", "mode"): "bucket",
    }
    assert text([12, 60] * 10, [128.0], mode="exact").options() == []


def test_only_lengths_that_requests_need_are_loaded_to_be_timed() -> None:
    path = (*OPENVINO, "text", "lengths")
    sizes = text([5, 16, 17, 70], [16.0, 32.0, 64.0, 96.0, 256.0])
    assert sizes.needed({}) == {path: [16, 32, 96]}
    assert sizes.needed({path: [20, 72, 256]}) == {path: [20, 72]}
    # All of them; none is compiled; longer ones are cut.
    assert sizes.needed({path: [16, 72]}) == {} == sizes.needed({MODE: "dynamic"})
    assert text([300], [16.0, 256.0]).needed({}) == {path: [256]}
    sounds = RequestSizes([Lengths("audio.lengths", [2], [0.5, 2.5, 30.0])], [1])
    assert sounds.needed({}) == {(*OPENVINO, "audio", "lengths"): [2.5]}


def test_batch_sizes_fit_requests_of_several_rows() -> None:
    plain = {"lengths": [], "rows": [3] * 20, "mode": "bucket", "buckets": "auto"}
    sizes = RequestSizes.from_plain(plain, 8)
    assert sizes.batches == [1, 2, 4, 8]
    (option,) = sizes.options()
    assert str(option).startswith("batching.buckets [3, 6, ") and json.loads(option.text)[-1] == 8
    assert "3 to 3 rows" in option.why
    # One row each: every size comes up, and the powers of two are right.
    assert RequestSizes.from_plain({**plain, "rows": [1] * 20}, 8).options() == []
    assert RequestSizes.from_plain({**plain, "buckets": [3, 6, 8]}, 8).options() == []


def test_every_value_is_valid() -> None:
    lengths = [
        (Lengths("text.lengths", [12, 60] * 9, [128.0]), TEXT),
        (Lengths("audio.lengths", [2, 7] * 9, [30.0]), TEXT),
        (
            Lengths("batching.dims.height", [20, 31] * 9, [64.0]),
            with_changes(TEXT, {
                ("handler", "openvino", "warmup", "inputs"): [{"shape": [3, "height", 4]}],
                ("handler", "openvino", "batching", "dims"): {"height": [64]},
            }),
        ),
    ]  # fmt: skip
    for each, config in lengths:
        options = RequestSizes([each], [1, 3] * 9, batches=[1, 2, 4]).options()
        assert any(option.path == each.path for option in options)
        for option in options:
            changed = changes(
                Candidate(ComputeSettings("f32", 2, 1, (option,)), 1, 1, 1),
                Candidate(ComputeSettings("f32", 2), 1, 1, 1),
                {},
            )
            load_serving_config(with_changes(config, changed), check_device=False)


def test_of_the_keys_that_decide_on_shapes_only_the_best_is_taken() -> None:
    fitted, separate, dynamic = text([12, 60] * 9, [128.0]).options([2])
    buckets = Option(("handler", "openvino", "batching", "buckets"), "[3]")
    backend = Option(("pt2", "compile", "backend"), '"export"')
    graph = Option(("handler", "openvino", "batching", "one_graph"), "true")
    gains = {separate: 2.0, fitted: 3.0, dynamic: 1.5, graph: 1.2, buckets: 1.3, backend: 1.1}
    taken = worth_taking({option: Interval(gain, gain - 0.05, gain + 0.05) for option, gain in gains.items()})
    assert set(taken) == {fitted, buckets, backend}
