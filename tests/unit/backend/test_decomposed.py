"""The report lists which operators were decomposed, and into what."""

import torch
from torch import nn

import torchserve_openvino as tov


def test_decompositions_are_reported() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.softplus(x)
        return nn.functional.softplus(y) + x.relu()

    compiled = tov.compile(model)
    with torch.inference_mode():
        compiled(torch.randn(3, 4))
    (graph,) = compiled.report.to_dict()["graphs"]
    assert graph["decomposed"].keys() == {"aten.softplus.default"}
    softplus = graph["decomposed"]["aten.softplus.default"]
    assert softplus["count"] == 2 and softplus["into"]["aten.exp.default"] == 2
    assert softplus["where"].startswith(__file__)
    assert "decomposed: 2x aten.softplus.default into " in compiled.report.to_text()
