"""Configurations that name the former package keep working, with a warning."""

import importlib
import sys
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(("name", "member"), [("ray", "app"), ("kserve", "main")])
def test_the_former_name_leads_to_the_present_one(name: str, member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither Ray nor KServe is needed to see where the name leads.
    monkeypatch.setitem(sys.modules, f"torchserve_openvino.hosts.{name}", SimpleNamespace(**{member: "the function"}))
    monkeypatch.delitem(sys.modules, f"torchserve_openvino.adapters.{name}", raising=False)
    with pytest.warns(DeprecationWarning, match=f"torchserve_openvino.hosts.{name}"):
        module = importlib.import_module(f"torchserve_openvino.adapters.{name}")
    assert getattr(module, member) == "the function"
    monkeypatch.delitem(sys.modules, f"torchserve_openvino.adapters.{name}", raising=False)
