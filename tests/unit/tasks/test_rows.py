"""How token sequences of different lengths become batches."""

from hypothesis import given
from hypothesis import strategies as st

from torchserve_openvino.tasks.text.base import by_length, fewest_tokens

LENGTHS, SIZES = [16, 32, 64], [1, 2, 4, 8]


def padded(groups: list[list[int]], rows: list[str], lengths: list[int], sizes: list[int]) -> int:
    """Tokens that are computed, and the cost of each call."""
    total = 0
    for group in groups:
        longest = max(len(rows[position]) for position in group)
        width = next((each for each in lengths if each >= longest), longest)
        total += next((each for each in sizes if each >= len(group)), len(group)) * width + 8
    return total


def rows_of(*lengths: int) -> list[str]:
    return ["t" * length for length in lengths]


def test_three_rows_run_as_two_and_one() -> None:
    assert sorted(map(len, fewest_tokens(rows_of(60, 60, 60), LENGTHS, SIZES))) == [1, 2]


def test_a_short_row_is_not_run_as_a_long_one() -> None:
    assert fewest_tokens(rows_of(60, 5, 61, 6), LENGTHS, SIZES) == [[0, 2], [1, 3]]


def test_a_short_row_fills_a_batch_where_a_call_of_its_own_costs_more() -> None:
    assert len(fewest_tokens(rows_of(15, 14, 13, 5), [8, 16], SIZES)) == 1


def test_no_rows() -> None:
    assert fewest_tokens([], LENGTHS, SIZES) == []


@given(st.lists(st.integers(1, 64), min_size=1, max_size=20), st.sampled_from([SIZES, [8], []]))
def test_every_row_runs_once_and_no_grouping_by_length_is_cheaper(lengths: list[int], sizes: list[int]) -> None:
    rows = rows_of(*lengths)
    groups = fewest_tokens(rows, LENGTHS, sizes)
    assert sorted(position for group in groups for position in group) == list(range(len(rows)))
    assert not sizes or max(map(len, groups)) <= sizes[-1]
    whole = [group[i : i + 8] for group in by_length(rows, LENGTHS) for i in range(0, len(group), 8)]
    assert padded(groups, rows, LENGTHS, sizes) <= padded(whole, rows, LENGTHS, sizes)
