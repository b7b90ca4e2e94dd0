"""How token sequences of different lengths become batches."""

import math

from hypothesis import given
from hypothesis import strategies as st

from torchserve_openvino.serving.requests.batching import UNKNOWN_OVERHEAD, cheapest_groups, overhead

LENGTHS, SIZES = [16, 32, 64], [1, 2, 4, 8]


def padded(groups: list[list[int]], rows: list[str], lengths: list[int], sizes: list[int], cost: int) -> int:
    """Tokens that are computed, and the cost of each call."""
    total = 0
    for group in groups:
        longest = max(len(rows[position]) for position in group)
        width = next((each for each in lengths if each >= longest), longest)
        total += next((each for each in sizes if each >= len(group)), len(group)) * width + cost
    return total


def rows_of(*lengths: int) -> list[str]:
    return ["t" * length for length in lengths]


def test_three_rows_run_as_two_and_one() -> None:
    assert sorted(map(len, cheapest_groups(rows_of(60, 60, 60), LENGTHS, SIZES, 8))) == [1, 2]


def test_a_short_row_is_not_run_as_a_long_one() -> None:
    assert cheapest_groups(rows_of(60, 5, 61, 6), LENGTHS, SIZES, 8) == [[0, 2], [1, 3]]


def test_a_short_row_fills_a_batch_where_a_call_of_its_own_costs_more() -> None:
    assert len(cheapest_groups(rows_of(15, 14, 13, 5), [8, 16], SIZES, 8)) == 1


def test_rows_share_a_call_where_calls_cost_more_than_padding() -> None:
    assert len(cheapest_groups(rows_of(60, 5, 61, 30), LENGTHS, SIZES, 200)) == 1


def test_no_rows() -> None:
    assert cheapest_groups([], LENGTHS, SIZES, 8) == []


@given(st.lists(st.integers(1, 64), min_size=1, max_size=20), st.sampled_from([SIZES, [8], []]), st.integers(0, 200))
def test_every_row_runs_once_and_no_grouping_by_length_is_cheaper(
    lengths: list[int], sizes: list[int], cost: int
) -> None:
    rows = rows_of(*lengths)
    groups = cheapest_groups(rows, LENGTHS, sizes, cost)
    assert sorted(position for group in groups for position in group) == list(range(len(rows)))
    assert not sizes or max(map(len, groups)) <= sizes[-1]
    by_length: dict[int, list[int]] = {}
    for position, length in enumerate(lengths):
        by_length.setdefault(next(each for each in LENGTHS if each >= length), []).append(position)
    whole = [group[i : i + 8] for group in by_length.values() for i in range(0, len(group), 8)]
    assert padded(groups, rows, LENGTHS, sizes, cost) <= padded(whole, rows, LENGTHS, sizes, cost)


@given(
    st.floats(0, 300),
    st.floats(1e-6, 1e-3),
    st.lists(
        st.tuples(st.sampled_from(SIZES), st.sampled_from(LENGTHS)),
        min_size=2,
        unique_by=lambda each: each[0] * each[1],
    ),
)
def test_the_overhead_of_a_call_follows_from_times_of_calls(tokens, seconds, calls) -> None:
    values = [rows * length for rows, length in calls]
    fitted = overhead([(count, (tokens + count) * seconds) for count in values])
    assert math.isclose(fitted, min(tokens, max(values)), rel_tol=1e-3, abs_tol=1e-2)


def test_a_slow_call_among_others_changes_the_overhead_little() -> None:
    calls = [(rows * length, 3e-3 + rows * length * 2e-5) for rows in SIZES for length in LENGTHS]
    calls[4] = (calls[4][0], calls[4][1] * 10)
    assert 120 < overhead(calls) < 180


def test_what_times_cannot_tell() -> None:
    assert overhead([]) == overhead([(64, 1.0), (64, 2.0)]) == UNKNOWN_OVERHEAD
    # All calls take as long, or larger ones take less: padding is free as far as was seen.
    assert overhead([(16, 1.0), (64, 1.0)]) == overhead([(16, 1.0), (64, 0.5)]) == 64
    assert overhead([(16, 0.0), (64, 0.0)]) == 64
