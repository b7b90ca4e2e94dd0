"""Core ATen: checks the coverage in the checked-in table, and reruns a few overloads."""

import pytest

from conformance import core, table
from conformance.core_samples import SAMPLES
from conformance.outcome import FAILURES, ON_OPENVINO

KNOWN = table.read(table.CORE)
RUN_ALL = "python scripts/op_conformance.py --core-only runs all of it, --write renews the table"
GOAL = 0.9


def test_nine_in_ten_core_overloads_run_on_openvino() -> None:
    assert sorted(KNOWN) == core.overloads(), RUN_ALL
    assert table.share(KNOWN) >= GOAL
    assert not [name for name, entry in KNOWN.items() if table.outcome_name(entry["core"]) in FAILURES]


@pytest.mark.parametrize(
    "name",
    [
        "aten.bitwise_or.Scalar", "aten.col2im.default", "aten.div.Scalar_mode", "aten.replication_pad3d.default",
        "aten.scatter.value", "aten.upsample_bilinear2d.vec", "aten.var.dim", "aten.atan2.out", "aten.randperm.default",
    ],
)  # fmt: skip
def test_an_overload_is_as_the_table_says(name: str) -> None:
    outcome = core.run(name, [])
    known = table.outcome_name(KNOWN[name]["core"])
    assert name in SAMPLES
    assert outcome.name == known or {outcome.name, known} <= set(ON_OPENVINO), f"{outcome}: {RUN_ALL}"
