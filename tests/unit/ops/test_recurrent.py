"""Recurrent layers run completely on OpenVINO and equal eager PyTorch; with gradients they run in torch."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import torchserve_openvino as tov
from helpers import assert_same, check
from torchserve_openvino.backend.conversion import convert

LAYERS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
each_layer = pytest.mark.parametrize("kind", LAYERS)


class Tagger(nn.Module):
    """A recurrent layer between linear layers; its final states are part of the output."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.layer = LAYERS[kind](4, 6, batch_first=True, **options)
        self.after = nn.Linear(12 if options.get("bidirectional") else options.get("proj_size", 6), 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y, state = self.layer(self.before(x))
        return self.after(y.relu()), state


@each_layer
@settings(max_examples=8, deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_any_layer(kind: str, data: st.DataObject) -> None:
    draw = data.draw
    batch_first, bidirectional, bias = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    depth, length, batch = draw(st.integers(1, 3)), draw(st.integers(2, 6)), draw(st.sampled_from([None, 2, 3]))
    projected = {"proj_size": 3} if kind == "lstm" and draw(st.booleans()) else {}
    layer = LAYERS[kind](
        4, 6, depth, bias=bias, batch_first=batch_first, bidirectional=bidirectional, **projected
    ).eval()
    shape = [length, 4] if batch is None else [batch, length, 4] if batch_first else [length, batch, 4]
    args: list[Any] = [torch.randn(shape)]
    if draw(st.booleans()):
        sizes = [6, 6] if kind == "lstm" else [6]
        sizes[0] = projected.get("proj_size", 6)
        rows = [depth * (2 if bidirectional else 1), *([] if batch is None else [batch])]
        states = tuple(torch.randn([*rows, size]) for size in sizes)
        args.append(states if kind == "lstm" else states[0])
    check(layer, *args)


@each_layer
def test_in_a_model_with_other_values_and_weights(kind: str) -> None:
    model = Tagger(kind, num_layers=2, bidirectional=True).eval()
    compiled = check(model, torch.randn(2, 5, 4))
    check(model, torch.randn(2, 5, 4), compiled=compiled)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    check(model, torch.randn(2, 5, 4), compiled=compiled)
    assert f"aten.{kind}.input" in compiled.report.to_dict()["graphs"][0]["partitions"][0]["op_counts"]


@each_layer
def test_weights_that_change_all_the_time(kind: str) -> None:
    model = Tagger(kind).eval()
    compiled = tov.compile(model)
    x = torch.randn(2, 5, 4)
    with torch.no_grad():
        for _ in range(8):
            for parameter in model.parameters():
                parameter.mul_(0.9)
            assert_same(compiled(x), model(x))
    assert compiled.report.summary.coverage == 1.0


@each_layer
def test_dynamic_shapes(kind: str) -> None:
    model = Tagger(kind, bidirectional=True).eval()
    compiled = check(model, torch.randn(2, 5, 4), dynamic=True)
    for shape in ((3, 5, 4), (2, 9, 4), (4, 7, 4)):
        check(model, torch.randn(shape), compiled=compiled)
    assert compiled.report.summary.graphs == 1, compiled.report.to_text()


def test_a_projected_lstm_of_any_length() -> None:
    compiled = check(Tagger("lstm", proj_size=2).eval(), torch.randn(2, 5, 4), dynamic=True)
    check(compiled.eager, torch.randn(3, 8, 4), compiled=compiled)


@each_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(kind: str, dtype: torch.dtype) -> None:
    check(Tagger(kind).eval().to(dtype), torch.randn(2, 5, 4).to(dtype))


@each_layer
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_extreme_values(kind: str, value: float) -> None:
    x = torch.randn(2, 5, 4)
    x[0, 2, 1] = value
    check(LAYERS[kind](4, 6, batch_first=True).eval(), x)


@each_layer
@pytest.mark.parametrize("backend", ["openvino_ts", "export"])
def test_other_backends(kind: str, backend: str) -> None:
    model = Tagger(kind, num_layers=2, bidirectional=True).eval()
    compiled = tov.compile(model, backend=backend)
    with torch.no_grad():
        for x in (torch.randn(2, 5, 4), torch.randn(2, 5, 4)):
            assert_same(compiled(x), model(x), strides=False)
    assert compiled.report.summary.coverage == 1.0, compiled.report.to_text()
    assert not compiled.report.fallbacks


@each_layer
def test_frozen(kind: str) -> None:
    model = Tagger(kind).eval()
    compiled = tov.compile(model).freeze()
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 5, 4)
            assert_same(compiled(x), model(x))
    assert compiled.frozen == 1


def test_from_the_cache(tmp_path: Any) -> None:
    model, x = Tagger("lstm").eval(), torch.randn(2, 5, 4)
    options = {"model_caching": True, "cache_dir": str(tmp_path)}
    with torch.no_grad():
        for _ in range(2):
            compiled = tov.compile(model, options=options).freeze()
            for _ in range(3):
                assert_same(compiled(x), model(x))
    assert compiled.report.to_dict()["cache"]["calls"]["hits"] == 1


@each_layer
def test_the_length_does_not_change_the_size_of_the_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = convert.fx_to_model

    def counted(*args: Any) -> Any:
        model, decoder = real(*args)
        sizes.append(len(model.get_ops()))
        return model, decoder

    monkeypatch.setattr(convert, "fx_to_model", counted)
    for length in (40, 4000):
        check(LAYERS[kind](4, 6), torch.randn(length, 1, 4))
    assert len(sizes) == 2 and sizes[0] == sizes[1]


@each_layer
def test_gradients_are_torchs_own(kind: str) -> None:
    model = Tagger(kind, num_layers=2, dropout=0.5).train()
    compiled = tov.compile(model)
    x = torch.randn(2, 5, 4)
    torch.manual_seed(0)
    compiled(x)[0].sum().backward()
    got = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(0)
    model(x)[0].sum().backward()
    assert_same(got, [parameter.grad for parameter in model.parameters()])
    breaks = compiled.report.to_dict()["graph_breaks"]
    assert any(f"aten.{kind}.input" in each["reason"] for each in breaks)
    # Without gradients, the same model then runs completely on OpenVINO.
    model.eval()
    with torch.no_grad():
        assert_same(compiled(x), model(x))
    (partition,) = compiled.report.to_dict()["graphs"][-1]["partitions"]
    assert f"aten.{kind}.input" in partition["op_counts"]


@each_layer
def test_dropout_stays_torchs_own(kind: str) -> None:
    model = Tagger(kind, num_layers=2, dropout=0.5).train()
    compiled = tov.compile(model)
    with torch.no_grad():
        x = torch.randn(2, 5, 4)
        torch.manual_seed(0)
        got = compiled(x)
        torch.manual_seed(0)
        assert_same(got, model(x))
    (fallback,) = compiled.report.fallbacks
    assert fallback.op == f"aten.{kind}.input" and "random" in fallback.reason


def test_a_disabled_layer_runs_as_one_operator() -> None:
    compiled = tov.compile(Tagger("gru").eval(), options={"disabled_ops": ["aten.gru"], "min_partition_us": 0})
    check(compiled.eager, torch.randn(2, 5, 4), compiled=compiled, coverage=None, fallbacks={"disabled_op": 1})


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("shape", [(3, 4), (4,)])
def test_cells(cell: type, shape: tuple[int, ...]) -> None:
    check(cell(4, 6).eval(), torch.randn(shape))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, state = self.layer(packed)
        return nn.utils.rnn.pad_packed_sequence(y, batch_first=True)[0] * 2, state


def test_packed_sequences_stay_in_eager_and_are_counted() -> None:
    model = Packed().eval()
    compiled = tov.compile(model)
    with torch.no_grad():
        for lengths in ([5, 3], [2, 5]):
            args = torch.randn(2, 5, 4), torch.tensor(lengths)
            assert_same(compiled(*args), model(*args))
    assert any("pack_padded_sequence" in each["reason"] for each in compiled.report.to_dict()["graph_breaks"])
