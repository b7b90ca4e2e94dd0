"""`torchserve-openvino selftest`."""

import json

from typer.testing import CliRunner

from torchserve_openvino.cli import app
from torchserve_openvino.serving.versions.probes import PROBES


def test_all_that_is_relied_on_holds() -> None:
    done = CliRunner().invoke(app, ["selftest", "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0, [each for each in found["probes"] if each["error"]]
    assert found["ok"] is True
    assert [each["about"] for each in found["probes"]] == [probe.about for probe in PROBES]
    assert {"torch", "openvino", "torchserve"} <= found["versions"].keys()


def test_one_that_does_not_hold_is_named(monkeypatch) -> None:
    def broken() -> None:
        raise AssertionError("gone in torch 3")

    monkeypatch.setattr(
        "torchserve_openvino.serving.versions.probes.PROBES", [type(PROBES[0])("a name", PROBES[0].packages, broken)]
    )
    done = CliRunner().invoke(app, ["selftest"])
    assert done.exit_code == 1
    assert "AssertionError: gone in torch 3 (broken)" in done.stdout
