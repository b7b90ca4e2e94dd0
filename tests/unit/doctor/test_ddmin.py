"""Delta debugging finds a passing 1-minimal subset, for any test function."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from torchserve_openvino.doctor.bisecting.bisect import minimize


def is_one_minimal(found: tuple[int, ...], passes: set[frozenset[int]]) -> bool:
    subset = frozenset(found)
    return subset in passes and not any(subset - {item} in passes for item in subset)


@given(count=st.integers(1, 40), guilty=st.sets(st.integers(0, 39)), singles=st.sampled_from([0, 2, None]))
def test_the_guilty_are_found_and_no_one_else(count: int, guilty: set[int], singles: int | None) -> None:
    guilty = {item % count for item in guilty}
    found = minimize(range(count), lambda subset: guilty <= set(subset), singles=singles)
    assert found is not None and found.proven
    assert found.items == tuple(sorted(guilty))


@given(
    count=st.integers(1, 6),
    passes=st.sets(st.frozensets(st.integers(0, 5))),
    singles=st.sampled_from([0, 1, None]),
)
def test_any_test_at_all(count: int, passes: set[frozenset[int]], singles: int | None) -> None:
    everything = frozenset(range(count))
    asked: Counter[frozenset[int]] = Counter()

    def test(subset: tuple[int, ...]) -> bool:
        assert list(subset) == sorted(subset)
        asked[frozenset(subset)] += 1
        return frozenset(subset) in passes

    found = minimize(range(count), test, singles=singles)
    assert set(asked.values()) <= {1}, "a subset was tested twice"
    if found is None:
        assert everything not in passes
    else:
        assert is_one_minimal(found.items, passes)
        assert found.tests == sum(asked.values())


def test_one_guilty_item_takes_few_tests() -> None:
    found = minimize(range(64), lambda subset: 37 in subset, singles=0)
    assert found is not None and found.items == (37,)
    # One for the empty set, one for all items, and at most two for each of the six halvings.
    assert found.tests <= 2 + 2 * 6


def test_suspects_are_tried_alone_first() -> None:
    found = minimize(["relu", "conv", "add"], lambda subset: "relu" in subset)
    assert found is not None and (found.items, found.tests) == (("relu",), 3)


def test_nothing_to_find() -> None:
    found = minimize([1, 2], lambda subset: True)
    assert found is not None and (found.items, found.tests) == ((), 1)
    assert minimize([1, 2], lambda subset: False) is None


def test_out_of_tests_the_best_so_far_is_returned_as_unproven() -> None:
    found = minimize(range(100), lambda subset: {3, 50, 97} <= set(subset), singles=0, max_tests=12)
    assert found is not None and not found.proven
    assert found.tests == 12 and {3, 50, 97} <= set(found.items)
    assert minimize(range(100), lambda subset: 3 in subset, max_tests=1) is None
