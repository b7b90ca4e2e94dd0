"""Text tasks in a worker in this process, against transformers' own pipelines in eager PyTorch."""

import functools
import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from task_worker import Worker
from ts.torch_handler.request_envelope.kservev2 import KServev2Envelope

from documents import python_answer, same_form, schema_problems, task_examples
from hub_models import minilm, text_model
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving import precision
from torchserve_openvino.serving.requests.batching import UNKNOWN_OVERHEAD
from torchserve_openvino.tasks.text.classifier import TextClassifier
from torchserve_openvino.tasks.text.embedder import SentenceEmbedder
from torchserve_openvino.tasks.text.fill_mask import FillMask
from torchserve_openvino.tasks.text.question_answerer import QuestionAnswerer
from torchserve_openvino.tasks.text.reranker import Reranker
from torchserve_openvino.tasks.text.token_classifier import TokenClassifier
from torchserve_openvino.tasks.text.zero_shot import ZeroShotClassifier

HANDLERS = {
    each.task: each
    for each in (
        TextClassifier, TokenClassifier, QuestionAnswerer, FillMask, SentenceEmbedder, ZeroShotClassifier, Reranker,
    )
}  # fmt: skip
SHORT = "Ada Lovelace lived in London."
LONG = "The quick brown fox jumps over the lazy dog, and then it sleeps for a very long time in the sun. " * 2
TEXTS = [SHORT, LONG, "Yes", "A train to Paris leaves at noon, said Charles Babbage to nobody in particular."]


def started(place: Path, task: str, folder: Path | None = None, **text: Any) -> Worker:
    """Loads a worker for a model, by default a small one with random weights."""
    openvino = {"text": {"lengths": [16, 64], **text}, "batching": {"buckets": [4]}}
    return Worker(place / "archive", HANDLERS[task], folder or text_model(task, place / "saved"), openvino)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Worker]:
    """One worker for each task, shared by the tests of a process: loading one takes seconds."""

    @functools.cache
    def of(task: str) -> Worker:
        return started(tmp_path_factory.mktemp(task), task, minilm() if task == "sentence_embedder" else None)

    return of


def close(got: Any, expected: Any) -> None:
    """Compares answers: numbers within the tolerance, everything else exactly."""
    assert type(got) is type(expected)
    if isinstance(got, dict):
        assert got.keys() == expected.keys()
        for key in got:
            close(got[key], expected[key])
    elif isinstance(got, list):
        assert len(got) == len(expected)
        for mine, theirs in zip(got, expected, strict=True):
            close(mine, theirs)
    else:
        assert got == (pytest.approx(expected, abs=2e-4, rel=2e-3) if isinstance(got, float) else expected)


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda each: each.item()))


def test_text_classifier_answers_as_the_pipeline_does(serve) -> None:
    worker = serve("text_classifier")
    reference = worker.pipeline("text-classification", top_k=None)
    answers = worker(
        TEXTS[0].encode(), TEXTS[1].encode(), {"inputs": TEXTS[2]}, {"inputs": TEXTS[3], "parameters": {"top_k": 1}}
    )
    expected = [{each["label"]: each["score"] for each in found} for found in reference(TEXTS)]
    for got, wanted in zip(answers[:3], expected[:3], strict=True):
        close(got, wanted)
        assert list(got) == list(wanted)
    assert list(answers[3]) == list(expected[3])[:1]
    worker.ran_compiled()


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max", "none"])
def test_token_classifier_answers_as_the_pipeline_does(serve, strategy) -> None:
    worker = serve("token_classifier")
    reference = worker.pipeline("token-classification", aggregation_strategy=strategy)
    answers = worker(*({"inputs": text, "parameters": {"aggregation_strategy": strategy}} for text in TEXTS))
    close(plain(answers), plain([reference(text) for text in TEXTS]))
    assert any(answers)
    for text, found in zip(TEXTS, answers, strict=True):
        assert all(text[each["start"] : each["end"]] for each in found)


def test_classes_of_one_name_count_once_by_the_best(serve, monkeypatch) -> None:
    worker = serve("text_classifier")
    scores = worker.one({"inputs": TEXTS[0]})
    best = next(iter(scores.values()))
    monkeypatch.setattr(type(worker.handler), "label", lambda self, number: "crane")
    assert worker.one({"inputs": TEXTS[0]}) == {"crane": pytest.approx(best, abs=1e-6)}


def test_fill_mask_answers_as_the_pipeline_does(serve) -> None:
    worker = serve("fill_mask")
    reference = worker.pipeline("fill-mask")
    # Four masks are filled by one row of a call.
    texts = ["The [MASK] sleeps.", "A [MASK] to [MASK].", LONG + " It is [MASK] .", "[MASK] " * 4, "[MASK] a b " * 9]
    answers = worker(*({"inputs": text} for text in texts), {"inputs": [texts[0], texts[4]]})
    expected = plain([reference(text) for text in texts])
    close(answers, [*expected, [expected[0], expected[4]]])
    targets = {"inputs": texts[0], "parameters": {"targets": ["dog", "cat"], "top_k": 2}}
    close(worker.one(targets), plain(reference(texts[0], targets=["dog", "cat"], top_k=2)))
    worker.ran_compiled()


def test_masks_that_are_refused(tmp_path: Path) -> None:
    worker = started(tmp_path, "fill_mask", max_inputs=2, too_long="truncate")
    good, bodies = {"inputs": "The [MASK] sleeps."}, [
        {"inputs": "[MASK] " * 9}, {"inputs": "no mask"}, {"inputs": LONG * 3 + "[MASK]"},
        {"inputs": "[MASK] [MASK]", "parameters": {"top_k": 501}},
    ]  # fmt: skip
    answers = worker(good, *bodies)
    assert [worker.status(i) for i in range(5)] == [200, 413, 400, 400, 400]
    assert "3 groups of 4 masks; the most is 2 (handler.openvino.text.max_inputs)" in str(answers[1])
    assert "has no [MASK]" in str(answers[2]) and "behind the text's last token" in str(answers[3])
    assert "2 masks with top_k 501 are 1002 words; the most is 1000" in str(answers[4])
    close(answers[0], worker.one(good))


def test_scores_of_other_words_are_not_computed(serve) -> None:
    """The vocabulary's product has a row for each of four masks, and not one for each token."""
    worker = serve("fill_mask")
    vocabulary = worker.handler.vocabulary
    for partition in worker.handler.served.compiled.running:
        nodes = partition.compiled.compiled.get_runtime_model().get_ordered_ops()
        scores = [str(node.get_output_partial_shape(0)) for node in nodes]
        assert {shape for shape in scores if shape.endswith(f",{vocabulary}]")} == {f"[4,4,{vocabulary}]"}


@pytest.mark.parametrize(("buckets", "expected"), [([4], {16}), ([1, 2, 4], {4})], ids=["one batch size", "any"])
def test_nor_are_they_in_a_graph_for_any_batch_size(buckets: list[int], expected: set[int], tmp_path: Path) -> None:
    openvino = {"text": {"lengths": [24, 64]}, "batching": {"buckets": buckets, "one_graph": True}}
    worker = Worker(tmp_path / "archive", FillMask, text_model("fill_mask", tmp_path / "saved"), openvino)
    vocabulary = worker.handler.vocabulary
    for partition in worker.handler.served.compiled.running:
        nodes = partition.compiled.compiled.get_runtime_model().get_ordered_ops()
        shapes = [tuple(node.get_output_shape(0)) for node in nodes if node.get_output_size()]
        assert {math.prod(shape[:-1]) for shape in shapes if shape[-1:] == (vocabulary,)} == expected


@pytest.mark.parametrize("multi", [False, True])
def test_zero_shot_answers_as_the_pipeline_does(serve, multi) -> None:
    worker = serve("zero_shot_classifier")
    reference = worker.pipeline("zero-shot-classification")
    labels = ["travel", "sleep", "computing machines of the nineteenth century"]
    asked = [{"inputs": text, "parameters": {"candidate_labels": labels, "multi_label": multi}} for text in TEXTS]
    for text, answer in zip(TEXTS, worker(*asked), strict=True):
        expected = reference(text, labels, multi_label=multi)
        wanted = [{"label": a, "score": b} for a, b in zip(expected["labels"], expected["scores"], strict=True)]
        close(answer, wanted)
    close(worker.one({"inputs": SHORT, "parameters": {"candidate_labels": ["travel"]}})[0]["score"],
          reference(SHORT, ["travel"])["scores"][0])  # fmt: skip


@pytest.mark.slow
def test_real_sentence_vectors_have_the_known_order(serve) -> None:
    worker = serve("sentence_embedder")
    texts = ["How old are you?", "What is your age?", "The train leaves at noon."]
    vectors = torch.tensor(worker(*({"inputs": text} for text in texts)))
    assert vectors.shape == (3, 384)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3), rtol=1e-4, atol=1e-4)
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > 0.7 and far < 0.3
    # The formula of sentence-transformers, in eager PyTorch.
    model = transformers.AutoModel.from_pretrained(minilm()).eval()
    given = transformers.AutoTokenizer.from_pretrained(minilm())(texts[2], return_tensors="pt")
    with torch.no_grad():
        alone = torch.nn.functional.normalize(model(**given).last_hidden_state.mean(1), dim=1)[0]
    torch.testing.assert_close(vectors[2], alone, rtol=1e-3, atol=1e-4)
    worker.ran_compiled()


@pytest.mark.slow
def test_reranker_orders_as_eager_does(serve) -> None:
    worker = serve("reranker")
    answers = worker({"query": SHORT, "texts": TEXTS}, {"inputs": {"query": "Yes", "texts": TEXTS[:1]}})
    model = transformers.AutoModelForSequenceClassification.from_pretrained(worker.folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(worker.folder)
    with torch.no_grad():
        scores = [torch.sigmoid(model(**tokenizer(SHORT, t, return_tensors="pt")).logits).item() for t in TEXTS]
    order = sorted(range(4), key=scores.__getitem__, reverse=True)
    close(answers[0], [{"index": i, "score": scores[i]} for i in order])
    assert [each["index"] for each in answers[1]] == [0]
    raw = worker.one({"query": SHORT, "texts": TEXTS, "parameters": {"raw_scores": True, "return_text": True}})
    assert [each["text"] for each in raw] == [TEXTS[i] for i in order]


def reference_span(folder: Path, question: str, context: str) -> tuple[float, int, int]:
    """The best span of tokens, by trying all of them, for a context that fits one window."""
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer(question, context, return_tensors="pt")
    ids = [i for i, part in enumerate(given.encodings[0].sequence_ids) if part == 1]
    with torch.no_grad():
        out = model(**given)
    first = torch.softmax(out.start_logits[0, [0, *ids]], 0)[1:]
    last = torch.softmax(out.end_logits[0, [0, *ids]], 0)[1:]
    spans = [
        (float(first[i] * last[j]), ids[i], ids[j]) for i in range(len(ids)) for j in range(i, min(i + 15, len(ids)))
    ]
    score, i, j = max(spans)
    encoding = given.encodings[0]
    start, end = (encoding.word_to_chars(encoding.token_to_word(place), 1) for place in (i, j))
    return score, start[0], end[1]


def test_question_answerer_finds_the_best_span(serve) -> None:
    worker = serve("question_answerer")
    asked = [{"question": "Who lived there?", "context": text} for text in TEXTS]
    for one, answer in zip(asked, worker(*asked), strict=True):
        score, start, end = reference_span(worker.folder, one["question"], one["context"])
        close(answer, {"score": score, "start": start, "end": end, "answer": one["context"][start:end]})


def test_a_long_context_is_read_in_windows(serve) -> None:
    worker = serve("question_answerer")
    context = " ".join(f"Item {i} is here." for i in range(60))
    several = worker.one({"inputs": {"question": "Which?", "context": context}, "parameters": {"top_k": 3}})
    assert len(several) == 3 and several[0]["score"] >= several[1]["score"] >= several[2]["score"]
    for each in several:
        assert context[each["start"] : each["end"]] == each["answer"] != ""
    too_much = worker.one({"question": "Which?", "context": context * 20})
    assert worker.status() == 413 and "windows" in too_much["message"]


@pytest.mark.parametrize(("words", "stride"), [(400, 1), (500, 10), (500, 40), (3000, 50), (3000, 300)])
def test_windows_are_counted_before_they_are_made(tmp_path: Path, serve, monkeypatch, words: int, stride: int) -> None:
    worker, context = serve("question_answerer"), " ".join(["item"] * words)
    tokenizer = worker.handler.tokenizer
    question = {"question": "Which?", "context": context}
    window = min(worker.handler.limit, 384)
    room = window - len(tokenizer("Which?").input_ids) - 1
    overlap = min(stride, room - 1)
    made = tokenizer(
        ["Which?"], [context], truncation="only_second", max_length=window, stride=overlap,
        return_overflowing_tokens=True,
    ).encodings  # fmt: skip
    calls: list[Any] = []
    call = type(tokenizer).__call__
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *a, **k: (calls.append(k), call(*a, **k))[1])
    answer = worker.one({"inputs": question, "parameters": {"doc_stride": overlap}})
    most = worker.handler._openvino.config.openvino.text.max_inputs
    if len(made) > most:
        assert worker.status() == 413 and f"{len(made)} windows of {window} tokens" in answer["message"]
    else:
        assert worker.status() == 200
    assert any(each.get("return_overflowing_tokens") for each in calls) == (len(made) <= most)


@pytest.mark.parametrize("task", HANDLERS)
def test_the_documented_request_gets_an_answer_of_the_documented_form(serve, task) -> None:
    request, shown = task_examples()[task]
    (body,) = re.findall(r"-d '([^']+)'", request)
    answer = serve(task).one(json.loads(body))
    assert same_form(answer, shown), answer
    close(python_answer(task, serve(task).respond), plain(answer))
    many = task == "sentence_embedder"
    assert schema_problems(task, "answers" if many else "answer", plain(answer)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "inputs", "parameters"),
    [
        ("token_classifier", SHORT, {"aggregation_strategy": "none", "ignore_labels": []}),
        ("question_answerer", {"question": "Who?", "context": LONG}, {"top_k": 3, "handle_impossible_answer": True}),
        ("fill_mask", "A [MASK] to [MASK].", {"top_k": 2}),
        ("reranker", {"query": "Who?", "texts": TEXTS}, {"return_text": True, "raw_scores": True}),
    ],
)
def test_other_forms_of_answers_are_those_of_the_schema(serve, task, inputs, parameters) -> None:
    body = {"inputs": inputs, "parameters": parameters}
    assert schema_problems(task, "request", body) == []
    answers = serve(task).one({**body, "inputs": [inputs, 7]})
    assert answers[1]["code"] == 400
    assert schema_problems(task, "answers", plain(answers)) == []
    assert schema_problems(task, "answer", plain(answers[0])) == [] and answers[0]


# --- requests that are wrong ----------------------------------------------------------------------------------


def test_each_bad_request_gets_its_own_status(serve) -> None:
    worker = serve("text_classifier")
    bodies = [
        SHORT.encode(), b"", {"inputs": " "}, {"inputs": "word " * 80}, {"inputs": 7}, {"input": SHORT}, b"\xff\xfe",
        {"inputs": SHORT, "parameters": {"topk": 1}}, {"inputs": SHORT, "parameters": {"top_k": 0}}, {"inputs": []},
        {"inputs": [SHORT] * 65},
    ]  # fmt: skip
    answers = worker(*bodies)
    assert [worker.status(i) for i in range(len(bodies))] == [200, *[400] * 9, 413]
    good = worker.one(SHORT.encode())
    close(answers[0], good)
    messages = [answer["message"] for answer in answers[1:]]
    for message, part in zip(messages, (
        "no body", "empty", "82 tokens; this model takes 64", "not a number", "'input'", "UTF-8", "'top_k'",
        "parameters.top_k", "empty list", "65 inputs",
    ), strict=True):  # fmt: skip
        assert part in message, message


def test_a_text_that_no_tokenizer_takes_fails_alone(serve, monkeypatch) -> None:
    worker = serve("text_classifier")
    good, bad = worker({"inputs": SHORT}, {"inputs": "half a pair: \ud800"})
    assert worker.status(1) == 400 and "surrogate" in bad["message"] and set(good) == {"calm", "angry", "glad"}
    # Any other failure of the tokenizer.
    encoded = worker.handler.encoded

    def failing(parts: Any) -> Any:
        if any(part.input == "Yes" for part in parts):
            raise TypeError("no text")
        return encoded(parts)

    monkeypatch.setattr(worker.handler, "encoded", failing)
    good, bad = worker({"inputs": SHORT}, {"inputs": "Yes"})
    assert worker.status(1) == 500 and "no text" in bad["message"] and set(good) == {"calm", "angry", "glad"}


def test_a_list_is_answered_by_a_list_with_a_status_for_each(serve) -> None:
    worker = serve("text_classifier")
    before = worker.handler.counters.to_dict().get("refused_400", 0)
    answers = worker({"inputs": [SHORT, "", LONG]}, SHORT.encode(), {"inputs": ["", " "]})
    assert [worker.status(i) for i in range(3)] == [207, 200, 400]
    close(answers[0][0], answers[1])
    assert answers[0][1]["code"] == 400 and "empty" in answers[0][1]["message"]
    assert set(answers[0][2]) == {"calm", "angry", "glad"}
    assert worker.handler.counters.to_dict()["refused_400"] == before + 3


def v2(*texts: str) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}]}


def test_strings_in_an_envelope_are_answered_one_by_one(serve) -> None:
    worker = serve("text_classifier")
    enveloped = KServev2Envelope(worker.handler.handle)
    plain_answers = worker(SHORT.encode(), LONG.encode())
    numbers = {"inputs": [{"name": "text", "shape": [2], "datatype": "INT64", "data": [1, 2]}]}
    several = worker.made.handle(
        enveloped, v2(SHORT), v2(SHORT, "", LONG), v2(""), v2("half a pair: \ud800"), numbers,
        v2(json.dumps({"inputs": SHORT, "parameters": {"top_k": 1}})), v2("", " "),
    )  # fmt: skip
    assert [worker.status(i) for i in range(7)] == [200, 207, 400, 400, 400, 200, 400]
    close(several[0]["outputs"][0]["data"], plain_answers[:1])
    first, refused, last = several[1]["outputs"][0]["data"]
    close([first, last], plain_answers)
    assert refused["code"] == 400 and several[1]["outputs"][0]["shape"] == [3]
    messages = [answer["outputs"][0]["data"][0]["message"] for answer in several[2:5]]
    assert "empty" in messages[0] and "surrogate" in messages[1] and "not a number" in messages[2]
    assert list(several[5]["outputs"][0]["data"][0]) == list(plain_answers[0])[:1]


def test_strings_become_one_tensor_of_vectors(serve) -> None:
    worker = serve("sentence_embedder")
    (answer,) = worker.made.handle(KServev2Envelope(worker.handler.handle), v2(SHORT, LONG))
    (output,) = answer["outputs"]
    assert output["shape"] == [2, 384] and output["datatype"] == "FP64"
    vectors = worker(SHORT.encode(), LONG.encode())
    close(torch.tensor(output["data"]).reshape(2, 384).tolist(), vectors)


def test_several_texts_become_several_vectors_and_refusals(serve) -> None:
    worker = serve("sentence_embedder")
    several, one = worker({"inputs": [SHORT, " ", LONG]}, SHORT.encode())
    assert [worker.status(place) for place in range(2)] == [207, 200]
    assert all(worker.made.context.get_response_content_type(place) == "application/json" for place in range(2))
    assert several[1]["code"] == 400 and "empty" in several[1]["message"]
    close([several[0], several[2]], worker(SHORT.encode(), LONG.encode()))
    assert len(one) == 384 and schema_problems("sentence_embedder", "answer", one) == []


@pytest.mark.slow
def test_no_file_of_labels_is_missed(tmp_path, caplog) -> None:
    """The model has labels of its own."""
    caplog.set_level(logging.INFO)
    started(tmp_path, "text_classifier")
    assert "coverage" in caplog.text and "index_to_name" not in caplog.text


@pytest.mark.slow
def test_a_long_text_is_cut_where_the_yaml_says_so(tmp_path) -> None:
    worker = started(tmp_path, "text_classifier", too_long="truncate", lengths=[16])
    assert set(worker.one({"inputs": "word " * 500})) == {"calm", "angry", "glad"}


def test_an_unusable_template_or_label_is_refused(serve) -> None:
    worker = serve("zero_shot_classifier")
    for parameters, part in (
        ({}, "candidate_labels"),
        ({"candidate_labels": []}, "candidate_labels"),
        ({"candidate_labels": ["a"], "hypothesis_template": "about {0.__class__}"}, "hypothesis_template"),
        ({"candidate_labels": [" "]}, "empty label"),
        ({"candidate_labels": ["x"] * 65}, "65 candidate_labels"),
    ):
        answer = worker.one({"inputs": SHORT, "parameters": parameters})
        assert worker.status() in {400, 413} and part in answer["message"], answer


# --- models that are wrong --------------------------------------------------------------------------------------


def test_a_model_of_another_task_is_refused(tmp_path) -> None:
    encoder = text_model("sentence_embedder", tmp_path / "encoder")
    classifier = text_model("text_classifier", tmp_path / "classifier")
    for number, (task, folder, message) in enumerate((
        ("token_classifier", encoder, r"no weights for classifier\.bias.*random numbers"),
        ("zero_shot_classifier", classifier, "no label 'entailment'"),
        ("reranker", classifier, "3 labels; a reranker"),
    )):  # fmt: skip
        with pytest.raises(ModelLoadError, match=message):
            started(tmp_path / str(number), task, folder)


@pytest.mark.parametrize(("limit", "lengths"), [(16, [16]), (40, [16, 32, 40]), (128, [*range(16, 129, 16)])])
def test_lengths_lie_close_together_by_default(tmp_path, limit, lengths) -> None:
    worker = started(tmp_path, "text_classifier", lengths="auto", max_tokens=limit)
    assert worker.handler.config.openvino.batching.dims == {"sequence": lengths}


def test_lengths_that_clients_would_have_to_know_are_refused(tmp_path) -> None:
    with pytest.raises(ModelLoadError, match=r"batching\.mode: exact would take texts of the compiled lengths only"):
        Worker(
            tmp_path / "archive", HANDLERS["text_classifier"], text_model("text_classifier", tmp_path / "saved"),
            {"batching": {"mode": "exact"}},
        )  # fmt: skip


def test_lengths_beyond_the_model_are_refused(tmp_path) -> None:
    folder = text_model("text_classifier", tmp_path / "short")
    with pytest.raises(ModelLoadError, match=r"max_tokens is 200.*takes 128"):
        started(tmp_path / "1", "text_classifier", folder, max_tokens=200)
    with pytest.raises(ModelLoadError, match=r"text\.lengths has 256.*128"):
        started(tmp_path / "2", "text_classifier", folder, lengths=[256])


@pytest.mark.slow
def test_auto_judges_bf16_of_a_real_embedder_by_the_cosine_of_its_rows(tmp_path: Path, monkeypatch) -> None:
    if "BF16" not in precision.device_capabilities("CPU"):
        pytest.skip("needs a CPU with bf16")
    monkeypatch.setattr(precision, "no_bf16x3", lambda device: "is not tried here.")
    monkeypatch.setattr(precision, "timed_pairs", lambda first, second, seconds: [1.5] * 20)
    openvino = {"text": {"lengths": [32]}, "batching": {"buckets": [4]}, "precision": "auto"}
    worker = Worker(tmp_path / "archive", SentenceEmbedder, minilm(), openvino)
    report = worker.handler.describe_handle()
    tried = report["config"]["precision_choice"]["tried"]["bf16"]
    assert tried["passed"], tried["problem"]
    assert report["summary"]["precision"] == "bf16"
    for stated in (tried["measure"], report["verify"]["measure"]):
        assert stated["name"] == "cosine" and stated["bound"] == 0.999 and 0.999 <= stated["worst"] < 1


def test_rows_of_different_lengths_share_calls_by_what_calls_were_measured_to_take(tmp_path: Path) -> None:
    openvino = {"text": {"lengths": [16, 64]}, "batching": {"buckets": [1, 4]}}
    worker = Worker(tmp_path / "archive", TextClassifier, text_model("text_classifier", tmp_path / "saved"), openvino)
    served = worker.handler._openvino.served
    assert served.overhead != UNKNOWN_OVERHEAD, "verification timed calls"
    rows, answers = [[0] * 12, [0] * 60, [0] * 12], []
    for served.overhead, calls in ((0.0, [[1], [2], [0]]), (1e4, [[0, 2, 1]])):
        assert worker.handler.groups(rows, [16, 64]) == calls
        answers.append(worker.one({"inputs": [SHORT, LONG, SHORT]}))
    close(*answers)


def test_targets_are_bounded_and_tokenized_once(serve, monkeypatch) -> None:
    worker = serve("fill_mask")
    text = "The [MASK] sleeps."
    calls = []
    one_token = FillMask._one_token
    tokenizer_calls = functools.lru_cache(lambda word: calls.append(word) or one_token(worker.handler, word))
    monkeypatch.setattr(worker.handler, "_token_of", tokenizer_calls)
    many = {"inputs": [text] * 4, "parameters": {"targets": ["dog", "cat", "dog"], "top_k": 2}}
    assert [len(each) for each in worker.one(many)] == [2] * 4 and calls == ["dog", "cat"]
    for targets, part in ((["dog"] * 1001, "at most 1000"), (["dog" * 100], "is not one token"), (["[UNK]"], "is not")):
        answer = worker.one({"inputs": text, "parameters": {"targets": targets}})
        assert worker.status(0) == 400 and part in answer["message"], answer


def test_a_field_beside_inputs_that_would_have_no_effect_is_refused(serve) -> None:
    worker = serve("text_classifier")
    answer = worker.one({"inputs": SHORT, "top_k": 1})
    assert worker.status(0) == 400 and "no field 'top_k'" in answer["message"] and "'parameters'" in answer["message"]
    # Clients of Hugging Face's API send these.
    assert (
        worker.one({"inputs": SHORT, "model": "net", "options": {"wait_for_model": True}}) and worker.status(0) == 200
    )


def test_labels_of_entities_may_be_named_by_the_archive(tmp_path: Path) -> None:
    named = started(tmp_path, "token_classifier")
    named.handler.mapping = {"1": "B-Person", "2": "I-Person"}
    found = {each["entity_group"] for text in TEXTS for each in named.one({"inputs": text})}
    assert "Person" in found and "PER" not in found


def test_an_embedder_needs_no_pooler(tmp_path: Path) -> None:
    folder = text_model("sentence_embedder", tmp_path / "saved")
    model = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    worker = started(tmp_path, "sentence_embedder", folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(SHORT, return_tensors="pt")
    with torch.no_grad():
        expected = model.eval()(**tokens).last_hidden_state[0].mean(0)
    close(worker.one(SHORT.encode()), expected.tolist())


def test_texts_are_read_as_sentence_transformers_reads_them(tmp_path: Path) -> None:
    folder = text_model("sentence_embedder", tmp_path / "saved")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    plain_one = started(tmp_path / "plain", "sentence_embedder", folder)
    expected = plain_one.one(b"query: ada")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": true}')
    prompts = {"prompts": {"query": "Query: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    reading = started(tmp_path / "reading", "sentence_embedder", folder)
    close(reading.one(b"ADA "), expected)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true, "include_prompt": false}')
    with pytest.raises(ModelLoadError, match="leaves the prompt's own tokens out"):
        started(tmp_path / "refused", "sentence_embedder", folder)


def test_nothing_found_is_a_list_where_a_list_is_asked_for(serve) -> None:
    worker = serve("question_answerer")
    body = {"inputs": {"question": "Who?", "context": "\u0000\u0001"}, "parameters": {"top_k": 3}}
    assert worker.one(body) == [{"score": 0.0, "start": 0, "end": 0, "answer": ""}]
