"""A part of the conformance run that takes a minute; `python scripts/op_conformance.py` runs all of it."""

import pytest
import torch

from conformance import cases, pool, table, tasks
from conformance.outcome import FAILURES, OUTCOMES, Outcome
from conformance.real_sizes import real_calls
from conformance.run_case import MODES
from conformance.table import outcome_name

KNOWN = table.read(table.OP_DB)
# Operators in which a defect was found, and at least one for each outcome.
OPERATORS = [
    "add", "all", "amax", "angle", "any", "argmin", "as_strided.partial_views", "atan2", "bincount", "bucketize",
    "cdist", "clamp", "copysign", "diagonal", "div.trunc_rounding", "expm1", "fmax", "hypot", "index_add", "index_fill",
    "index_put", "isnan", "linalg.cross", "linalg.svd", "logaddexp", "logical_and", "logsumexp", "masked_scatter",
    "max.reduction_with_dim", "nn.functional.dropout", "nn.functional.logsigmoid", "nn.functional.pixel_unshuffle",
    "nn.functional.softplus", "nonzero", "positive", "repeat", "rot90", "round.decimals_3", "scatter_add",
    "searchsorted", "signal.windows.bartlett", "signbit", "sort", "topk", "trunc", "view",
]  # fmt: skip
SAMPLES = 3
RUN_ALL = "python scripts/op_conformance.py runs all of it, --write renews the table"


@pytest.fixture(scope="module")
def outcomes() -> table.Table:
    """Runs each operator in its first supported dtype; with one worker, since the tests themselves run in parallel."""
    found: table.Table = {}

    def done(task: dict[str, str], outcome: Outcome) -> None:
        found.setdefault(task["name"], {})[task["dtype"]] = str(outcome)

    asked = [tasks.op_task(name, cases.supported(name)[0], SAMPLES) for name in OPERATORS]
    pool.run_all(asked, 1, 120.0, done)
    return found


def test_a_part_of_op_db_is_right_and_as_the_table_says(outcomes: table.Table) -> None:
    failed = [
        f"{name} {entry}" for name, es in outcomes.items() for entry in es.values() if outcome_name(entry) in FAILURES
    ]
    assert not failed, RUN_ALL
    # Fewer samples than the table's cause fewer fallbacks, never more; those of a mixed operator may all fall back.
    worse, _ = table.compare(outcomes, KNOWN)
    assert not [line for line in worse if not line.endswith("(was mixed)")], RUN_ALL


# One or two of each family; OpenVINO lost digits, or was wrong at these sizes, in several.
AT_REAL_SIZES = [
    "cumsum", "index_select", "log_softmax", "mean", "nn.functional.conv2d", "nn.functional.group_norm",
    "nn.functional.interpolate.bilinear", "nn.functional.max_pool2d", "nn.functional.scaled_dot_product_attention",
    "sort", "tanh", "var",
]  # fmt: skip


def test_operators_are_right_at_real_sizes() -> None:
    found: table.Table = {}

    def done(task: dict[str, str], outcome: Outcome) -> None:
        found[task["name"]] = {cases.REAL: str(outcome)}

    asked = [tasks.op_task(name, cases.REAL, SAMPLES) for name in AT_REAL_SIZES]
    pool.run_all(asked, 1, 120.0, done)
    assert len(found) == len(AT_REAL_SIZES)
    assert not table.compare(found, KNOWN)[0], RUN_ALL


def test_samples_of_real_sizes_are_large_and_keep_what_an_operator_needs() -> None:
    for name in ("add", "softmax", "gather", "matmul"):
        calls = real_calls(name)
        assert calls, name
        assert all(max(t.numel() for t in call.args if isinstance(t, torch.Tensor)) >= 1_000 for call in calls)
    # Boundaries stay sorted, and indices in range.
    boundaries = real_calls("searchsorted")[0].args[0]
    assert bool((boundaries.diff(dim=-1) >= 0).all())
    source, _, index = real_calls("index_select")[0].args
    assert index.numel() > 100
    assert int(index.max()) < source.shape[0]
    # What eager itself refuses is no sample.
    assert real_calls("jiterator_unary") == []


# OpenVINO fuses these with the arithmetic after them, or once did, and gets wrong results.
FOLLOWED = ["amax", "linalg.vector_norm", "matmul", "mean", "nn.functional.group_norm", "softmax", "sum"]


def test_numbers_behind_an_operator_are_right() -> None:
    found: list[str] = []

    def done(task: dict[str, str], outcome: Outcome) -> None:
        found.append(f"{task['name']} {outcome}")

    asked = [tasks.op_task(name, "float32", SAMPLES, followed=True) for name in FOLLOWED]
    pool.run_all(asked, 1, 120.0, done)
    assert len(found) == len(FOLLOWED)
    assert not [line for line in found if outcome_name(line.split(maxsplit=1)[1]) in FAILURES]


@pytest.mark.parametrize("mode", MODES)
def test_the_table_has_every_operator_and_nothing_wrong(mode: str) -> None:
    known = table.read(table.op_db_path(mode))
    missing = [name for name in cases.op_infos() if cases.supported(name) and name not in known]
    assert not missing, RUN_ALL
    entries = [(name, dtype, entry) for name, by_dtype in known.items() for dtype, entry in by_dtype.items()]
    assert not [entry for entry in entries if outcome_name(entry[2]) not in OUTCOMES]
    # An operator that does not run on OpenVINO has a reason.
    silent = [e for e in entries if outcome_name(e[2]) in {"mixed", "fallback", "not_traceable"} and ": " not in e[2]]
    assert not silent


def test_the_part_covers_every_outcome() -> None:
    covered = {outcome_name(entry) for name in OPERATORS for entry in KNOWN[name].values()}
    assert covered >= set(OUTCOMES) - {"eager_refuses"}
