"""/explanations/: token attributions of text_classifier in eager PyTorch, and refusals of everything else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from serving_worker import WARMUP, Archive, save_weights
from task_worker import Worker
from ts.torch_handler.request_envelope.kserve import KServeEnvelope

from documents import pages, same_form, schema_problems
from hub_models import VOCABULARY, text_model
from torchserve_openvino.errors import NotExplainedError
from torchserve_openvino.tasks.tensor import TensorHandler
from torchserve_openvino.tasks.text.classifier import TextClassifier, integrated_gradients
from torchserve_openvino.tasks.text.embedder import SentenceEmbedder

TEXT = "Ada Lovelace lived in London."
EXPLAIN, PREDICT = {"explain": "True"}, {"explain": "False"}


def started(place: Path, kind: Any = TextClassifier, task: str = "text_classifier", **openvino: Any) -> Worker:
    own = {"text": {"lengths": [16]}, "batching": {"buckets": [2]}, **openvino}
    return Worker(place / "archive", kind, text_model(task, place / "saved"), own)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return started(tmp_path_factory.mktemp("explained"))


def explained(worker: Worker, *bodies: Any) -> list[Any]:
    return worker.made.handle_with(worker.handler, bodies, [EXPLAIN for _ in bodies])


def logits(worker: Worker, ids: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(worker.folder).eval()
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]


def test_importances_sum_to_the_difference_of_the_scores(worker) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(worker.folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    blank = ids.clone()
    blank[0, 1:-1] = tokenizer.pad_token_id
    scores, start = logits(worker, ids), logits(worker, blank)
    (usual,) = explained(worker, {"inputs": TEXT})
    assert usual["label"] == next(iter(worker.one({"inputs": TEXT})))
    for number, label in worker.handler.labels.items():
        (found,) = explained(worker, {"inputs": TEXT, "parameters": {"target": label, "steps": 200}})
        assert found["label"] == label and found["words"] == tokenizer.convert_ids_to_tokens(ids[0])
        total = float(scores[number] - start[number])
        assert abs(found["delta"]) < 0.02 * max(1.0, abs(total))
        assert sum(found["importances"]) == pytest.approx(total + found["delta"], abs=1e-3)
        # Special tokens are those of the text of padding, too.
        assert found["importances"][0] == found["importances"][-1] == 0 and any(found["importances"])
        (same,) = explained(worker, {"inputs": TEXT, "parameters": {"target": number, "steps": 200}})
        assert same["importances"] == pytest.approx(found["importances"], abs=1e-5)


def test_importances_are_those_of_the_formula(worker) -> None:
    """A Riemann sum of many small steps, with gradients of the whole batch by torch itself."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(worker.folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(worker.folder)
    given = tokenizer(TEXT, return_tensors="pt")
    embed = model.get_input_embeddings()
    end = embed(given.input_ids).detach()
    start = end.clone()
    start[0, 1:-1] = embed(torch.tensor(tokenizer.pad_token_id))
    places = (torch.arange(400) + 0.5).view(-1, 1, 1) / 400
    path = (start + places * (end - start)).detach().requires_grad_()
    model(inputs_embeds=path, attention_mask=given.attention_mask.expand(400, -1)).logits[:, 1].sum().backward()
    assert path.grad is not None
    expected = ((end - start) * path.grad.mean(0)).sum(-1)[0]
    (found,) = explained(worker, {"inputs": TEXT, "parameters": {"target": 1, "steps": 200}})
    torch.testing.assert_close(torch.tensor(found["importances"]), expected, rtol=0.02, atol=0.02)


SMALL = {"vocab_size": 60, "num_labels": 3, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("Roberta", {**SMALL, "intermediate_size": 24}),
        ("DistilBert", {"vocab_size": 60, "num_labels": 3, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}),
        ("Albert", {**SMALL, "embedding_size": 8, "intermediate_size": 24}),
        ("Electra", {**SMALL, "embedding_size": 8, "intermediate_size": 24}),
        ("Deberta", {**SMALL, "intermediate_size": 24}),
        ("MPNet", {**SMALL, "intermediate_size": 24}),
    ],
)
def test_other_models(kind, sizes) -> None:
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    ids = torch.tensor([[2, 11, 12, 13, 14, 3]])
    blank = torch.tensor([[2, 1, 1, 1, 1, 3]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = integrated_gradients(model, given, blank, 1, 50)
    with torch.no_grad():
        scores = [model(input_ids=each, attention_mask=given["attention_mask"]).logits[0, 1] for each in (blank, ids)]
    # Padding in the middle moves the positions of RoBERTa's ids, but not those of embeddings.
    if kind not in {"Roberta", "MPNet"}:
        assert float(found.importances.sum()) == pytest.approx(float(scores[1] - scores[0]), abs=1e-4)
    assert abs(found.delta) < 1e-4 and bool(found.importances[1:-1].all())


def test_an_encoder_and_decoder_is_refused() -> None:
    config = transformers.BartConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, eos_token_id=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    ids = torch.tensor([[0, 11, 12, 2]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(NotExplainedError, match="Bart"):
        integrated_gradients(transformers.BartForSequenceClassification(config).eval(), given, ids, 1, 4)


@pytest.mark.slow
def test_they_are_counted_as_computed_outside_of_the_compiled_model(tmp_path) -> None:
    worker = started(tmp_path)
    before = worker.one({"inputs": TEXT})
    worker.ran_compiled()
    for _ in range(2):
        explained(worker, {"inputs": TEXT})
        report = worker.report()
    (entry,) = report["fallbacks"]
    assert (entry["kind"], entry["op"], entry["count"]) == ("outside_compiled", "explanations", 2)
    assert "classifier.py" in entry["where"], entry
    # They are their own requests' doing: the coverage of predictions stays.
    assert report["summary"]["coverage"] == 1.0 and report["serving"]["policy"]["holds"]
    # Answers still run compiled, and nothing was compiled anew.
    assert worker.one({"inputs": TEXT}) == before
    assert report["serving"]["compiles_after_ready"] == 0 and worker.report()["fallbacks"] == report["fallbacks"]


def test_a_batch_may_mix_both(worker) -> None:
    bodies = [{"inputs": TEXT}, TEXT.encode(), {"inputs": ""}, {"inputs": [TEXT, "Yes", " "]}, {"inputs": TEXT}]
    answers = worker.made.handle_with(worker.handler, bodies, [PREDICT, EXPLAIN, EXPLAIN, EXPLAIN, PREDICT])
    assert [worker.status(i) for i in range(5)] == [200, 200, 400, 207, 200]
    assert answers[0] == answers[4] and set(answers[0]) == {"calm", "angry", "glad"}
    assert answers[1] == answers[3][0] and answers[3][2]["code"] == 400
    assert schema_problems("text_classifier", "explanation", answers[1]) == []


def test_an_envelope_keeps_them_apart(worker) -> None:
    enveloped = KServeEnvelope(worker.handler.handle)
    answers = worker.made.handle_with(
        enveloped, [{"instances": [TEXT, TEXT]}, {"wrong": 1}, {"instances": [TEXT]}], [PREDICT, PREDICT, EXPLAIN],
    )  # fmt: skip
    assert [worker.status(i) for i in range(3)] == [200, 400, 200]
    assert [set(each) for each in answers[0]["predictions"]] == [{"calm", "angry", "glad"}] * 2
    assert [set(each) for each in answers[2]["explanations"]] == [{"label", "words", "importances", "delta"}]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"target": "sad"}, "no label 'sad'; it has calm, angry, glad"), ({"target": 3}, "no label 3"),
     ({"target": -1}, "no label -1"), ({"steps": 1}, "parameters.steps"), ({"top_k": 1}, "valid parameters")],
)  # fmt: skip
def test_wrong_parameters_are_refused(worker, parameters, message) -> None:
    (answer,) = explained(worker, {"inputs": TEXT, "parameters": parameters})
    assert worker.status() == 400 and message in answer["message"]


@pytest.mark.slow
def test_a_policy_that_forbids_eager_pytorch_refuses_them_and_keeps_its_worker(tmp_path) -> None:
    worker = started(tmp_path, fallback={"allow": [], "on_violation": "refuse"})
    (answer,) = explained(worker, {"inputs": TEXT})
    assert worker.status() == 422 and "eager PyTorch" in answer["message"]
    report = worker.report()
    assert report["fallbacks"] == [] and report["serving"]["policy"]["holds"]
    assert set(worker.one({"inputs": TEXT})) == {"calm", "angry", "glad"}


@pytest.mark.slow
def test_a_policy_of_coverage_allows_them_and_keeps_its_worker(tmp_path) -> None:
    worker = started(tmp_path, fallback={"min_coverage": 0.9, "on_violation": "refuse"})
    (answer,) = explained(worker, {"inputs": TEXT})
    assert worker.status() == 200 and answer["label"] in {"calm", "angry", "glad"}
    assert worker.report()["serving"]["policy"]["holds"]
    assert set(worker.one({"inputs": TEXT})) == {"calm", "angry", "glad"}


def test_a_model_that_takes_no_embeddings_is_refused(worker, monkeypatch) -> None:
    model = worker.handler.eager_model.model

    def failing() -> Any:
        raise NotImplementedError("no embeddings")

    monkeypatch.setattr(model, "get_input_embeddings", failing)
    (answer,) = explained(worker, {"inputs": TEXT})
    assert worker.status() == 501 and "no embeddings" in answer["message"]
    wrong = torch.nn.Embedding(VOCABULARY, 32)
    monkeypatch.setattr(model, "get_input_embeddings", lambda: wrong)
    (answer,) = explained(worker, {"inputs": TEXT})
    assert worker.status() == 501 and "differently" in answer["message"]


def test_freed_weights_are_named(worker, monkeypatch) -> None:
    monkeypatch.setattr(type(worker.handler.served), "released", property(lambda self: True))
    (answer,) = explained(worker, {"inputs": TEXT})
    assert worker.status() == 501 and "release_weights" in answer["message"]


@pytest.mark.slow
def test_tasks_without_explanations_say_so(tmp_path) -> None:
    embedder = started(tmp_path / "text", SentenceEmbedder, "sentence_embedder")
    (answer,) = explained(embedder, {"inputs": TEXT})
    assert embedder.status() == 501 and "/predictions/" in answer["message"]
    made = Archive(tmp_path / "tensor", {"handler": {"openvino": {"warmup": WARMUP}}}, weights=save_weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "tensor"))
        handler = TensorHandler()
        handler.initialize(made.context)
    (refused,) = made.handle_with(handler, [{"data": [[1.0, 2.0, 3.0, 4.0]]}], [EXPLAIN])
    assert made.status(0) == 501 and "no explanations" in refused["message"]


def test_the_documented_explanation(worker) -> None:
    page = pages()["docs/tasks.md"]
    ((body, shown),) = re.findall(
        r"^curl -d '([^']+)'.*/explanations/text_classifier\n```\n\n```json\n(.+?)\n```", page, re.M
    )
    assert schema_problems("text_classifier", "explanation_request", json.loads(body)) == []
    assert schema_problems("text_classifier", "explanation", json.loads(shown)) == []
    (answer,) = explained(worker, json.loads(body))
    assert same_form(answer, json.loads(shown)) and answer["words"] == json.loads(shown)["words"]
