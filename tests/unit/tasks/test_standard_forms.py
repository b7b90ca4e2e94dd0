"""Requests in the forms of OpenAI, Cohere, Jina and TEI, by their official clients where there are any."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from task_worker import Worker

from hub_models import minilm, text_model
from torchserve_openvino.errors import BusyError, InvalidInputError
from torchserve_openvino.hosts.http import STANDARD
from torchserve_openvino.packaging.hub_model import check_loads, hub_model
from torchserve_openvino.tasks.standard.embeddings import TeiEmbed
from torchserve_openvino.tasks.standard.form import Counted, ModelFacts, refusal_form
from torchserve_openvino.tasks.standard.refusal_forms import form_of_path
from torchserve_openvino.tasks.text.classifier import TextClassifier
from torchserve_openvino.tasks.text.embedder import SentenceEmbedder
from torchserve_openvino.tasks.text.reranker import Reranker

SHORT, LONG = "Ada Lovelace lived in London.", "A train to Paris leaves at noon, said Charles Babbage to nobody."
TEXTS = [SHORT, "Yes", LONG]
DOCUMENTS = ["In London.", "At noon.", "Nobody knows why."]
TOO_LONG = "word " * 99


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    openvino = {"text": {"lengths": [16, 64], "max_inputs": 8}, "batching": {"buckets": [4]}}
    return Worker(tmp_path_factory.mktemp("embedder") / "archive", SentenceEmbedder, minilm(), openvino)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    place = tmp_path_factory.mktemp("reranker")
    openvino = {"text": {"lengths": [16, 64], "max_inputs": 8}, "batching": {"buckets": [4]}}
    return Worker(place / "archive", Reranker, text_model("reranker", place / "saved"), openvino)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    place = tmp_path_factory.mktemp("classifier")
    openvino = {"text": {"lengths": [16]}, "batching": {"buckets": [4]}}
    return Worker(place / "archive", TextClassifier, text_model("text_classifier", place / "saved"), openvino)


def ask(worker: Worker, *requests: tuple[str, Any]) -> list[tuple[int, Any]]:
    """Statuses and answers of one batch of ``(path below the model's, body)``."""
    headers = [{"explain": "False", **({"url_path": path} if path else {})} for path, _ in requests]
    answers = worker.made.handle_with(worker.handler, [body for _, body in requests], headers)
    return [
        (worker.status(place), json.loads(answer) if isinstance(answer, bytes) else answer)
        for place, answer in enumerate(answers)
    ]


def one(worker: Worker, path: str, body: Any) -> tuple[int, Any]:
    (answer,) = ask(worker, (path, body))
    return answer


def transport(worker: Worker) -> httpx.Client:
    """A client whose requests reach the worker as TorchServe passes them on."""

    def respond(request: httpx.Request) -> httpx.Response:
        _, model, version, *path = request.url.path.strip("/").split("/")
        assert (model, version) == ("net", "1.0")
        status, answer = one(worker, "/".join(path), json.loads(request.content) if request.content else b"")
        return httpx.Response(status, json=answer)

    return httpx.Client(transport=httpx.MockTransport(respond))


def client(worker: Worker) -> openai.OpenAI:
    url = "http://host/predictions/net/1.0/v1"
    return openai.OpenAI(base_url=url, api_key="none", http_client=transport(worker), max_retries=0)


def eager_vectors(texts: list[str]) -> tuple[torch.Tensor, int]:
    """sentence-transformers' formula for MiniLM in eager PyTorch, text by text, and the number of tokens."""
    model = transformers.AutoModel.from_pretrained(minilm()).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
    vectors, tokens = [], 0
    for text in texts:
        given = tokenizer(text, return_tensors="pt")
        tokens += given["input_ids"].shape[1]
        with torch.no_grad():
            vectors.append(torch.nn.functional.normalize(model(**given).last_hidden_state.mean(1), dim=1)[0])
    return torch.stack(vectors), tokens


def same(got: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-3, atol=1e-4)


# --- OpenAI's embeddings ---------------------------------------------------------------------------------------------


def test_the_official_client_gets_eagers_vectors(embedder: Worker) -> None:
    expected, tokens = eager_vectors(TEXTS)
    # The client itself asks for base64.
    found = client(embedder).embeddings.create(model="net", input=TEXTS, user="someone")
    assert [each.index for each in found.data] == [0, 1, 2] and found.object == "list" and found.model == "net"
    same([each.embedding for each in found.data], expected)
    assert found.usage.prompt_tokens == found.usage.total_tokens == tokens
    floats = client(embedder).embeddings.create(model="net", input=LONG, encoding_format="float")
    same(floats.data[0].embedding, expected[2])
    embedder.ran_compiled()


def test_base64_is_little_endian_float32(embedder: Worker) -> None:
    body = {"input": SHORT, "model": "net"}
    _, numbers = one(embedder, "v1/embeddings", body)
    _, coded = one(embedder, "v1/embeddings", {**body, "encoding_format": "base64"})
    raw = base64.b64decode(coded["data"][0]["embedding"])
    assert np.frombuffer(raw, dtype="<f4").tolist() == pytest.approx(numbers["data"][0]["embedding"], abs=1e-7)


def test_fewer_dimensions_are_scaled_to_length_1(embedder: Worker) -> None:
    expected, _ = eager_vectors([SHORT])
    found = client(embedder).embeddings.create(model="net", input=SHORT, dimensions=100)
    same(found.data[0].embedding, torch.nn.functional.normalize(expected[0, :100], dim=0))


def test_token_ids_run_as_they_are(embedder: Worker) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    expected, tokens = eager_vectors(TEXTS)
    found = client(embedder).embeddings.create(model="net", input=ids)
    same([each.embedding for each in found.data], expected)
    assert found.usage.total_tokens == tokens
    same(client(embedder).embeddings.create(model="net", input=ids[1]).data[0].embedding, expected[1])


def test_the_list_of_models(embedder: Worker, classifier: Worker) -> None:
    for worker in (embedder, classifier):
        assert [each.id for each in client(worker).models.list()] == ["net"]
        assert client(worker).models.retrieve("net").object == "model"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist here"):
        client(embedder).models.retrieve("other")


@pytest.mark.parametrize(
    ("change", "status", "param", "message"),
    [
        ({"input": []}, 400, "input", "input is an empty list"),
        ({"input": ""}, 400, "input", "input is empty"),
        ({"input": ["a", " "]}, 400, "input[1]", "input is empty"),
        ({"input": ["a", 5]}, 400, "input[1]", "must be a text, not a number"),
        ({"input": {"a": 1}}, 400, "input", "not an object"),
        ({"input": ["a", TOO_LONG]}, 400, "input[1]", "takes 64"),
        ({"input": [[1, 2], [3, 10**6]]}, 400, "input[1]", "token 1 is 1000000; token ids are numbers from 0 to 30521"),
        ({"input": [1, -1]}, 400, "input", "token 1 is -1"),
        ({"input": [1] * 65}, 400, "input", "has 65 tokens"),
        ({"input": [1, True]}, 400, "input", "token 1 is True"),
        ({"input": ["a"] * 9}, 413, "input", "the most is 8 (handler.openvino.text.max_inputs)"),
        ({"dimensions": 385}, 400, "dimensions", "vectors have 384 numbers"),
        ({"dimensions": 0}, 400, "dimensions", "greater than or equal to 1"),
        ({"encoding_format": "hex"}, 400, "encoding_format", "'float' or 'base64'"),
        ({"model": "other"}, 404, "model", "this endpoint serves 'net'"),
        ({"dimension": 5}, 400, "dimension", "Did you mean 'dimensions'?"),
    ],
)
def test_bad_requests_are_refused_in_openais_form(
    embedder: Worker, change: dict[str, Any], status: int, param: str, message: str
) -> None:
    for path in ("v1/embeddings", ""):
        got, answer = one(embedder, path, {"input": "a", "model": "net", **change})
        assert (got, answer["error"]["param"]) == (status, param)
        assert message in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"


def test_an_error_is_one_for_the_official_client(embedder: Worker) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client(embedder).embeddings.create(model="net", input=["a", TOO_LONG])
    assert raised.value.param == "input[1]"
    with pytest.raises(openai.NotFoundError, match="v1/embed, v1/embed_sparse, v1/models, and the"):
        client(embedder).completions.create(model="net", prompt="a")
    assert one(embedder, "v1/embeddings", b"{")[1]["error"]["message"].startswith("the body must be a JSON object")


def test_a_server_error_is_in_the_form_as_well(embedder: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(SentenceEmbedder, "answer", fail)
    status, answer = one(embedder, "v1/embeddings", {"input": "a"})
    assert status == 500 and answer["error"]["type"] == "server_error" and "broken" in answer["error"]["message"]


def test_an_answer_that_is_too_long_is_refused_in_the_form(embedder: Worker, monkeypatch) -> None:
    place = "torchserve_openvino.serving.worker.answering.most_response_bytes"
    monkeypatch.setattr(place, lambda context: 1000)
    status, answer = one(embedder, "v1/embeddings", {"input": "a"})
    assert status == 413 and "max_response_size is 1000" in answer["error"]["message"]


# --- rankings --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scores(reranker: Worker) -> list[float]:
    """Eager PyTorch's scores of `DOCUMENTS`."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(reranker.folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(reranker.folder)
    with torch.no_grad():
        return [torch.sigmoid(model(**tokenizer(SHORT, d, return_tensors="pt")).logits).item() for d in DOCUMENTS]


def test_the_official_cohere_clients_get_eagers_order(reranker: Worker, scores: list[float]) -> None:
    cohere = pytest.importorskip("cohere", reason="needs the package cohere")
    given = {"api_key": "none", "base_url": "http://host/predictions/net/1.0", "httpx_client": transport(reranker)}
    order = sorted(range(3), key=scores.__getitem__, reverse=True)
    found = cohere.ClientV2(**given).rerank(model="net", query=SHORT, documents=DOCUMENTS, top_n=2)
    assert [each.index for each in found.results] == order[:2]
    assert [each.relevance_score for each in found.results] == pytest.approx([scores[i] for i in order[:2]], abs=2e-4)
    assert found.id and found.meta.tokens.input_tokens > 0
    older = cohere.Client(**given).rerank(
        model="net", query=SHORT, documents=[{"text": each} for each in DOCUMENTS], return_documents=True
    )
    assert [each.document.text for each in older.results] == [DOCUMENTS[i] for i in order]
    with pytest.raises(cohere.errors.BadRequestError, match=r"documents\[1\] is empty"):
        cohere.ClientV2(**given).rerank(model="net", query=SHORT, documents=["a", ""])


def test_cohere_and_jina_by_their_documented_bodies(reranker: Worker, scores: list[float]) -> None:
    order = sorted(range(3), key=scores.__getitem__, reverse=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(reranker.folder)
    tokens = sum(len(tokenizer(SHORT, each)["input_ids"]) for each in DOCUMENTS)
    body = {"model": "net", "query": SHORT, "documents": DOCUMENTS, "top_n": 9, "return_documents": True}
    for path in ("v1/rerank", "v2/rerank", "rerank", ""):
        status, answer = one(reranker, path, body)
        assert status == 200 and answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] == tokens
        assert [each["index"] for each in answer["results"]] == order
        assert [each["document"] for each in answer["results"]] == [{"text": DOCUMENTS[i]} for i in order]
        found = [each["relevance_score"] for each in answer["results"]]
        assert found == pytest.approx([scores[i] for i in order], abs=2e-4)
    bare = one(reranker, "v1/rerank", {"query": SHORT, "documents": [{"text": "a", "id": 1}]})[1]
    assert bare["results"][0].keys() == {"index", "relevance_score"}
    reranker.ran_compiled()


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"documents": []}, 400, "documents is an empty list"),
        ({"documents": ["a", {"title": "b"}]}, 400, 'documents[1] has no "text"'),
        ({"documents": ["a", {"text": 5}]}, 400, "documents[1].text must be a text"),
        ({"documents": "a"}, 400, "documents: input should be a valid list"),
        ({"documents": ["a"] * 9}, 413, "the most is 8"),
        ({"query": ""}, 400, "query is empty"),
        ({"top_n": 0}, 400, "top_n"),
        ({"rank_fields": ["title"]}, 400, "rank_fields is not supported here"),
        ({"max_tokens_per_doc": 5}, 400, "max_tokens_per_doc is not supported here"),
        ({"documents": ["b", TOO_LONG]}, 400, "documents[1]: the text has"),
        ({"model": "other"}, 404, "this endpoint serves 'net'"),
    ],
)
def test_bad_rankings_have_cohere_s_message(
    reranker: Worker, change: dict[str, Any], status: int, message: str
) -> None:
    got, answer = one(reranker, "v2/rerank", {"query": "a", "documents": ["b"], **change})
    assert got == status and message in answer["message"]


# --- TEI -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 100])
def test_tei_cuts_vectors_and_scales_them_only_where_asked(width: int) -> None:
    vector, facts = torch.arange(1.0, 385.0), ModelFacts("net", loaded=0.0, max_inputs=8, normalizes=False)
    for normalize in (True, False):
        form = TeiEmbed({"inputs": "a", "normalize": normalize, "dimensions": width}, facts)
        (shown,) = form.answer([Counted(SimpleNamespace(value=vector), 1)])
        expected = vector[:width]
        same(shown.tolist(), torch.nn.functional.normalize(expected, dim=0) if normalize else expected)


def test_tei_embeds_in_lists(embedder: Worker) -> None:
    expected, _ = eager_vectors(TEXTS)
    same(one(embedder, "embed", {"inputs": TEXTS})[1], expected)
    same(one(embedder, "embed", {"inputs": SHORT, "normalize": True, "truncate": False})[1], expected[:1])
    assert one(embedder, "embed", {"inputs": SHORT, "normalize": False})[0] == 400
    status, answer = one(embedder, "embed", {"inputs": [SHORT, TOO_LONG]})
    assert status == 400 and answer["error_type"] == "Validation" and answer["error"].startswith("inputs[1]: the text")


# --- sparse vectors --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sparse_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse encoder as sentence-transformers saves it: the words that a masked language model predicts."""
    folder = text_model("fill_mask", tmp_path_factory.mktemp("sparse") / "saved")
    kinds = "sentence_transformers.sparse_encoder.models"
    modules = [
        {"type": f"{kinds}.MLMTransformer", "path": ""},
        {"type": f"{kinds}.SpladePooling", "path": "1_SpladePooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_SpladePooling").mkdir()
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": None}
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture(scope="module")
def sparse(sparse_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    openvino = {"text": {"lengths": [16, 64]}, "batching": {"buckets": [4]}}
    return Worker(tmp_path_factory.mktemp("sparse_worker") / "archive", SentenceEmbedder, sparse_folder, openvino)


def dense(weights: list[dict[str, Any]], width: int) -> torch.Tensor:
    vector = torch.zeros(width)
    for each in weights:
        vector[each["index"]] = each["value"]
    return vector


def test_a_sparse_model_answers_with_the_weights_of_words(sparse: Worker, sparse_folder: Path) -> None:
    model = transformers.AutoModelForMaskedLM.from_pretrained(sparse_folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(sparse_folder)
    vectors = []
    for text in TEXTS:
        with torch.no_grad():
            vectors.append(model(**tokenizer(text, return_tensors="pt")).logits.relu().log1p().amax(1)[0])
    # The texts have different lengths: padding must not add words.
    (status, answers), (_, own) = ask(sparse, ("embed_sparse", {"inputs": TEXTS}), ("", {"inputs": TEXTS}))
    assert status == 200 and answers == own
    for answer, expected in zip(answers, vectors, strict=True):
        same(dense(answer, len(expected)).tolist(), expected)
        assert answer and all(each["value"] > 0 for each in answer)
    sparse.ran_compiled()


def test_forms_of_dense_and_sparse_vectors_are_not_mixed(sparse: Worker, embedder: Worker) -> None:
    for path, body in (("v1/embeddings", {"input": SHORT}), ("embed", {"inputs": SHORT})):
        status, answer = one(sparse, path, body)
        assert status == 400 and "embed_sparse" in json.dumps(answer)
    status, answer = one(embedder, "embed_sparse", {"inputs": SHORT})
    assert status == 400 and "not sparse" in answer["error"]


def test_a_sparse_encoder_s_folder_becomes_an_archive(sparse_folder: Path) -> None:
    model = hub_model(sparse_folder, None)
    assert model.task.handler == "sentence_embedder" and Path("1_SpladePooling/config.json") in model.files
    assert "ForMaskedLM" in check_loads(model)


def test_tei_truncates_what_asks_for_it_and_nothing_else(embedder: Worker) -> None:
    ids = transformers.AutoTokenizer.from_pretrained(minilm())(TOO_LONG, truncation=True, max_length=64)["input_ids"]
    expected = one(embedder, "v1/embeddings", {"input": ids})[1]["data"][0]["embedding"]
    cut, refused, plain = ask(
        embedder,
        ("embed", {"inputs": TOO_LONG, "truncate": True}),
        ("embed", {"inputs": TOO_LONG}),
        ("embed", {"inputs": SHORT}),
    )
    same(cut[1][0], torch.tensor(expected))
    assert (cut[0], refused[0], plain[0]) == (200, 400, 200)


def test_tei_ranks(reranker: Worker, scores: list[float]) -> None:
    order = sorted(range(3), key=scores.__getitem__, reverse=True)
    status, answer = one(reranker, "rerank", {"query": SHORT, "texts": DOCUMENTS, "return_text": True})
    assert status == 200 and [each["index"] for each in answer] == order
    assert [each["text"] for each in answer] == [DOCUMENTS[i] for i in order]
    raw = one(reranker, "rerank", {"query": SHORT, "texts": DOCUMENTS, "raw_scores": True, "truncate": True})[1]
    assert torch.sigmoid(torch.tensor([each["score"] for each in raw])).tolist() == pytest.approx(
        [scores[i] for i in order], abs=2e-4
    )
    assert "error_type" in one(reranker, "rerank", {"query": SHORT, "texts": []})[1]


def test_tei_classifies(classifier: Worker) -> None:
    expected = [
        [{"label": a, "score": b} for a, b in each.items()] for each in classifier({"inputs": ["Yes", "No"]})[0]
    ]
    assert one(classifier, "predict", {"inputs": "Yes"}) == (200, expected[0])
    assert one(classifier, "predict", {"inputs": [["Yes"], ["No"]]}) == (200, expected)
    status, answer = one(classifier, "predict", {"inputs": ["Yes", "No"]})
    assert status == 400 and "pairs of texts are not served" in answer["error"]


# --- together --------------------------------------------------------------------------------------------------------


def test_forms_share_a_batch_and_a_bad_one_hurts_no_other(embedder: Worker) -> None:
    expected, _ = eager_vectors(TEXTS)
    answers = ask(
        embedder,
        ("", {"inputs": SHORT}),
        ("v1/embeddings", {"input": TEXTS, "model": "net"}),
        ("v1/embeddings", {"input": ["a", TOO_LONG]}),
        ("embed", {"inputs": LONG}),
        ("", {"input": LONG}),
        ("v1/models", b""),
        ("", {"inputs": [SHORT, TOO_LONG]}),
        ("nothing", {"inputs": SHORT}),
        ("", SHORT.encode()),
    )
    assert [status for status, _ in answers] == [200, 200, 400, 200, 200, 200, 207, 404, 200]
    own, many, bad, tei, body, models, parts, unknown, bare = (answer for _, answer in answers)
    for got, wanted in ((own, 0), (tei[0], 2), (body["data"][0]["embedding"], 2), (parts[0], 0), (bare, 0)):
        same(got, expected[wanted])
    same([each["embedding"] for each in many["data"]], expected)
    assert bad["error"]["param"] == "input[1]" and parts[1]["code"] == 400
    assert models["data"][0]["id"] == "net" and unknown["error"]["code"] == "unknown_url"


def test_own_requests_with_a_field_of_another_form_stay_what_they_were(
    embedder: Worker, reranker: Worker, classifier: Worker
) -> None:
    assert len(one(embedder, "", {"inputs": "a", "input": "b"})[1]) == 384
    assert one(reranker, "", {"query": "a", "texts": ["b"]})[1][0].keys() == {"index", "score"}
    assert one(classifier, "anything", {"inputs": "a"})[0] == 404
    status, answer = one(reranker, "", {"query": "a", "texts": ["b", "c", TOO_LONG]})
    assert status == 400 and answer["message"].startswith("texts[2]: the text has 103 tokens")
    status, answer = one(embedder, "", {"question": "a"})
    assert status == 400 and answer["type"] == "InvalidInputError"


def test_a_task_without_forms_knows_its_path_only_as_a_model_list(tmp_path: Path) -> None:
    from torchserve_openvino.tasks.text.fill_mask import FillMask

    openvino = {"text": {"lengths": [16]}, "batching": {"buckets": [1]}}
    worker = Worker(tmp_path / "archive", FillMask, text_model("fill_mask", tmp_path / "saved"), openvino)
    plain: Callable[[str], tuple[int, Any]] = lambda path: one(worker, path, {"inputs": "a [MASK]"})
    assert plain("") == plain("as/before")
    assert plain("v1/embeddings")[0] == 404 and plain("v1/models")[1]["data"][0]["id"] == "net"


@pytest.mark.parametrize("task", [SentenceEmbedder, Reranker, TextClassifier])
def test_hosts_refuse_in_the_form_of_the_task(task: Any) -> None:
    # A host's front process knows paths only; the task knows its endpoints.
    paths = [path for path in STANDARD if path.rpartition("/")[2] in {endpoint.path for endpoint in task.endpoints}]
    # Whose a request to this one is, the body decides; only TEI's clients send it there.
    paths = [path for path in paths if path != "rerank"]
    assert paths
    for path in paths:
        for error in (BusyError("full"), InvalidInputError("odd")):
            by_path, by_task = form_of_path(path), refusal_form(task.endpoints, path)
            assert by_path is not None and by_task is not None
            assert by_path(error) == by_task(error), path


@pytest.mark.parametrize("body", [{"query": "q"}, b"{"])
def test_a_bad_ranking_is_refused_in_the_usual_form_of_its_path(reranker: Worker, body: Any) -> None:
    status, answer = one(reranker, "rerank", body)
    assert status == 400 and answer["error_type"] == "Validation"
    status, answer = one(reranker, "v1/rerank", body)
    assert status == 400 and "message" in answer
