"""The cache and the doctor compare answers on more than one set of values."""

import pytest
import torch
from cache_models import Glued, Net, X, assert_hit, cache_of, fresh
from torch import nn

from helpers import assert_same, leave_unwritten, stick
from torchserve_openvino.config import resolve_options
from torchserve_openvino.doctor.bisecting.experiments import Experiments
from torchserve_openvino.doctor.target import SampleCall


@pytest.mark.parametrize("make", [Net, Glued])
@pytest.mark.parametrize("fault", [stick, leave_unwritten])
def test_what_comes_from_the_cache_is_proven_on_other_values_too(tmp_path, monkeypatch, fault, make) -> None:
    with torch.inference_mode():
        cold = fresh(make().eval(), tmp_path)
        for _ in range(2):
            cold(X)
        warm = fresh(make().eval(), tmp_path)
        fault(monkeypatch)
        warm(X)
    assert cache_of(warm)["verified"]["rejected"] == 1


def test_a_model_to_which_the_order_of_values_matters_still_comes_from_the_cache(tmp_path) -> None:
    class Sorted(nn.Module):
        """Refuses values out of order, as an index of segments does."""

        def forward(self, x: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.embedding_bag(torch.arange(6), x, bags, mode="sum") * 2

    model = Sorted().eval()
    bags = torch.tensor([0, 1, 5])
    table = torch.randn(6, 2)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="offsets"):
            model(table, bags.flip(0))
        for _ in range(2):
            compiled = fresh(model, tmp_path)
            for _ in range(2):
                assert_same(compiled(table, bags), model(table, bags))
    assert_hit(compiled)


@pytest.mark.parametrize("fault", [stick, leave_unwritten])
def test_an_experiment_of_the_doctor_sees_it(monkeypatch, fault) -> None:
    experiments = Experiments(Net().eval(), SampleCall((X,), {}), resolve_options({}))
    assert experiments.run().good
    fault(monkeypatch)
    outcome = experiments.run()
    assert "differs" in outcome.difference and outcome.max_abs > 0
