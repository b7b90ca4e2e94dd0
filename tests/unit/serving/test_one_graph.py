"""One graph of symbolic sizes for all compiled shapes, with one copy of the weights, or a graph for each shape."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_worker import NETWORK, WARMUP, network, save_weights

from encoder import ENCODER, IDS, MASK, encoder, save_encoder
from torchserve_openvino.config.sections.openvino_section import OpenVINOSection, WarmupInput
from torchserve_openvino.serving.shapes import one_graph
from torchserve_openvino.serving.shapes.input_spec import Signature, declared_specs
from torchserve_openvino.serving.shapes.inputs import DeclaredInputs
from torchserve_openvino.serving.shapes.plan import Shapes
from torchserve_openvino.tasks.tensor import TensorHandler

BY_SIZE = NETWORK.replace("return self", "x = x * x.shape[0] if x.shape[0] % 2 == 1 else x\n        return self")
# The output size of this operator depends on values, so it runs in eager.
REPEATED = NETWORK.replace("relu())", "relu()).repeat_interleave(torch.ones(3, dtype=torch.int64), dim=1)")


@pytest.fixture
def large(monkeypatch) -> None:
    """Makes weights of any size worth sharing."""
    monkeypatch.setattr(one_graph, "WORTH_BYTES", 1)


def settings(one="auto", backend="openvino", options=None, **section) -> dict:
    batching = {"one_graph": one, **section.pop("batching", {})}
    return {
        "pt2": {"compile": {"backend": backend, "options": options or {}}},
        "handler": {"openvino": {"warmup": WARMUP, "batching": batching, **section}},
    }


def started(archive, config, batch_size=4, model_file=NETWORK, weights=save_weights):
    made = archive(config, model_file=model_file, weights=weights, batch_size=batch_size)
    handler = TensorHandler()
    handler.initialize(made.context)
    return made, handler, handler.describe_handle()


def rows(count: int) -> list:
    return torch.linspace(-1, 1, 4 * count).reshape(count, 4).tolist()


def check(made, handler, model, sizes=(1, 2, 3, 4)) -> None:
    for size in sizes:
        for _ in range(2):
            (answer,) = made.handle(handler, {"data": rows(size)})
            with torch.no_grad():
                torch.testing.assert_close(torch.tensor(answer), model(torch.tensor(rows(size))))


def test_several_batch_sizes_share_a_graph(archive, large) -> None:
    made, handler, report = started(archive, settings())
    assert report["summary"]["graphs"] == 2 and report["summary"]["coverage"] == 1.0
    one = report["config"]["one_graph"]
    assert one["shared"] and one["graphs"] == "one for all shapes but a batch of 1" and "3 copies" in one["why"]
    assert len(report["serving"]["shapes"]["signatures"]) == 3
    assert report["serving"]["shapes"]["frozen"] == 3, report["serving"]["shapes"]["guarded"]
    check(made, handler, network())
    after = handler.describe_handle()
    assert after["serving"]["compiles_after_ready"] == 0 and after["fallbacks"] == []


def test_lengths_share_it_too(archive, large) -> None:
    config = settings(batching={"dims": {"sequence": [4, 8, 16]}}, warmup={"inputs": [IDS, MASK]})
    made, handler, report = started(archive, config, 2, ENCODER, save_encoder)
    assert report["summary"]["graphs"] == 2 and report["summary"]["coverage"] == 1.0
    assert report["serving"]["shapes"]["frozen"] == 2 * 3
    for length in (1, 4, 7, 16):
        tokens = [[(7 * i + length) % 50 for i in range(length)]]
        (answer,) = made.handle(handler, {"inputs": {"ids": tokens}})
        with torch.no_grad():
            for name, value in encoder()(torch.tensor(tokens)).items():
                torch.testing.assert_close(torch.tensor(answer[name]), value, rtol=1e-4, atol=1e-5)
    assert handler.describe_handle()["serving"]["compiles_after_ready"] == 0


def test_a_graph_for_each_where_it_is_asked_for_or_copies_are_small(archive) -> None:
    for config in (settings(one=False), settings()):
        made, handler, report = started(archive, config)
        assert report["summary"]["graphs"] == 3 and not report["config"]["one_graph"]["shared"]
        check(made, handler, network())
    made, handler, report = started(archive, settings(one=True))
    one = report["config"]["one_graph"]
    assert report["summary"]["graphs"] == 1 and one["shared"] and one["graphs"] == "one for all shapes"
    check(made, handler, network())


def test_a_model_that_asks_for_the_size_gets_a_graph_for_each(archive, large) -> None:
    # The answers depend on the batch size, so no batch is padded.
    def by_size(x: torch.Tensor) -> torch.Tensor:
        return network()(x * x.shape[0] if x.shape[0] % 2 == 1 else x)

    made, handler, report = started(archive, settings(), 3, BY_SIZE)
    assert not report["config"]["one_graph"]["shared"], report["config"]["one_graph"]
    assert "needs to know more sizes" in report["config"]["one_graph"]["why"]
    assert report["summary"]["graphs"] == 3 and report["summary"]["recompiles"] == 0
    assert [graph["inputs"][0][:2] for graph in report["graphs"]] == ["[1", "[2", "[3"]
    check(made, handler, by_size, sizes=(1, 2, 3))


def test_what_does_not_convert_is_compiled_for_each_shape_and_counted_once(archive, large) -> None:
    made, handler, report = started(archive, settings(), 3, REPEATED)
    one = report["config"]["one_graph"]
    assert not one["shared"] and "%" in one["why"]
    # The report does not include what the trial counted, and each declared shape is compiled as planned.
    assert report["summary"]["recompiles"] == 0 and all(not graph["dynamic"] for graph in report["graphs"])

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return network()(x).repeat_interleave(torch.ones(3, dtype=torch.int64), dim=1)

    check(made, handler, repeated, sizes=(1, 2))


def test_wrong_answers_in_one_graph_are_compiled_for_each_shape(archive, large, monkeypatch) -> None:
    from torchserve_openvino.serving.verification.admission import Admission

    compared: list[int] = []
    compare = Admission.compare

    def first_fails(self, model, report, precision=None):
        compared.append(report.summary.graphs)
        result = compare(self, model, report, precision)
        return {**result, "passed": len(compared) > 1 and result["passed"]}

    monkeypatch.setattr(Admission, "compare", first_fails)
    made, handler, report = started(archive, settings())
    assert compared == [2, 3] and not report["config"]["one_graph"]["shared"] and report["verify"]["passed"]
    check(made, handler, network())


def test_a_warm_start_reads_one_compiled_model_and_answers_the_same(archive, large, tmp_path) -> None:
    options = {"model_caching": True, "cache_dir": str(tmp_path / "cache")}
    answers = []
    for start in range(2):
        made, handler, report = started(archive, settings(options=options))
        assert report["config"]["one_graph"]["shared"] and report["summary"]["graphs"] == 2
        answers.append([made.handle(handler, {"data": rows(size)}) for size in (1, 2, 4)])
        cache = report["cache"]
        if start:
            assert cache["calls"] == {"hits": 3, "misses": 0} and cache["imports"] == 2
    assert answers[0] == answers[1]


def test_the_cache_tells_one_graph_from_a_graph_for_each(archive, tmp_path) -> None:
    options = {"model_caching": True, "cache_dir": str(tmp_path / "cache")}
    started(archive, settings(one=True, options=options))
    _, _, report = started(archive, settings(one=False, options=options))
    assert report["cache"]["calls"]["hits"] == 0 and report["summary"]["graphs"] == 3


@pytest.mark.parametrize(
    ("section", "device", "batches", "part", "graphs", "why"),
    [
        ({}, "CPU", (1, 2, 4, 8), "", "one for all shapes but a batch of 1", "4 copies of 80 MB"),
        ({}, "CPU", (2, 4, 8), "", "one for all shapes but a batch of 1", "3 copies of 80 MB"),
        # Two graphs, one of them for a batch of 1, save only one copy.
        ({}, "CPU", (1, 2, 4), "", "one for each shape", "little"),
        ({}, "CPU", (1,), "", "one for each shape", "1 copy"),
        ({}, "GPU", (1, 2, 4, 8), "", "one for each shape", "GPU runs static"),
        ({}, "CPU", (1, 2, 4, 8), "encoder", "one for each shape", "part of a model"),
        ({"batching": {"one_graph": True}}, "GPU", (1,), "encoder", "one for all shapes", "one_graph: true"),
        ({"batching": {"one_graph": False}}, "CPU", (1, 2, 4, 8), "", "one for each shape", "one_graph: false"),
        ({"batching": {"mode": "dynamic"}}, "CPU", (1, 2, 4, 8), "", "one for each shape", "dynamic anyway"),
    ],
)
def test_the_choice_and_its_reason(section, device, batches, part, graphs, why) -> None:
    shapes = Shapes(inputs(), signatures=[Signature(batch) for batch in batches])
    eager = torch.nn.Embedding(1000, 20_000, _weight=torch.empty(1000, 20_000))
    choice = one_graph.choose(eager, config(section, device), shapes, part)
    plain = choice.to_plain()
    assert plain["graphs"] == graphs and why in plain["why"] and plain["shared"] == (graphs != "one for each shape")
    assert bool(choice.limit) is ("but" in graphs)


def config(section=None, device="CPU", backend="openvino", dynamic=None) -> Any:
    resolved = SimpleNamespace(options=SimpleNamespace(device=device)) if backend != "inductor" else None
    pt2 = SimpleNamespace(backend=backend, dynamic=dynamic)
    return SimpleNamespace(openvino=OpenVINOSection(**(section or {})), pt2=pt2, backend=resolved)


def inputs() -> DeclaredInputs:
    return DeclaredInputs(declared_specs([WarmupInput(shape=[4])], ["x"]), ["x"])


def test_small_weights_and_foreign_backends_keep_a_graph_for_each() -> None:
    shapes, small = Shapes(inputs(), signatures=[Signature(n) for n in (1, 2, 4)]), torch.nn.Linear(4, 4)
    assert "would save too little" in one_graph.choose(small, config(), shapes).why
    assert "inductor compiles" in one_graph.choose(small, config(backend="inductor"), shapes).why
    assert "export compiles" in one_graph.choose(small, config(backend="export"), shapes).why
    assert "dynamic anyway" in one_graph.choose(small, config(dynamic=True), shapes).why
    assert "no inputs" in one_graph.choose(small, config(), Shapes(None)).why


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, ""),
        ({"coverage": 0.5}, "50.0%"),
        ({"fallbacks": 1}, "1 fallback"),
        ({"recompiles": 1}, ""),
        ({"recompiles": 2}, "know more sizes"),
    ],
)
def test_flaws(facts, text) -> None:
    summary = SimpleNamespace(**{"coverage": 1.0, "fallbacks": 0, "recompiles": 0, "graphs": 1, **facts})
    found = one_graph.GraphChoice("", inputs().open_axes(ones=False), limit=2).flaw(summary)  # type: ignore[arg-type]
    assert (text in found) if text else not found
    assert not one_graph.GraphChoice("asked for", inputs().open_axes(ones=True)).flaw(summary)  # type: ignore[arg-type]


@pytest.mark.parametrize("pictures", [True, False])
def test_convolutions_along_open_sizes_of_pictures_keep_graphs_of_their_own(large, monkeypatch, pictures) -> None:
    samples = WarmupInput(name="x", shape=["samples"], dtype="float32")
    dims = {"samples": [8, 16]}
    convolution = torch.nn.Conv2d(1, 2, 3, padding=1) if pictures else torch.nn.Conv1d(1, 2, 3)
    model = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 1, -1) if pictures else (1, -1)), convolution)
    shapes = Shapes(
        DeclaredInputs(declared_specs([samples], ["x"]), ["x"], dims, pads=True, exact=False),
        signatures=[Signature(rows, {"samples": length}) for rows in (1, 2) for length in dims["samples"]],
    )
    asked = config()
    choice = one_graph.choose(model, asked, shapes)
    assert (choice.open_axes is None) == pictures
    assert not pictures or "convolutions along an open size are slower" in choice.why
    monkeypatch.setattr(one_graph, "MOST_BYTES", 100)
    assert one_graph.choose(model, asked, shapes).open_axes is not None
