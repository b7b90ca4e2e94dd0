"""`torchserve-openvino tasks`, and what is known of a model's task."""

import json

import pytest
from typer.testing import CliRunner

from documents import task_examples
from torchserve_openvino.cli import app
from torchserve_openvino.cli.handler_path import handlers
from torchserve_openvino.packaging.starter import templates
from torchserve_openvino.tasks.catalog import TASKS, guessed, named


def test_it_lists_every_handler() -> None:
    done = CliRunner().invoke(app, ["tasks", "--json"])
    assert done.exit_code == 0
    rows = {row["task"]: row for row in json.loads(done.stdout)}
    assert rows.keys() == handlers().keys()
    assert rows["fill_mask"]["hugging_face"] == "fill-mask" and rows["fill_mask"]["installed"]
    table = CliRunner().invoke(app, ["tasks"]).stdout
    assert all(name in table for name in rows)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rows = json.loads(CliRunner().invoke(app, ["tasks", "--json"]).stdout)
    (row,) = [row for row in rows if row["task"] == "reranker"]
    assert row["missing"] == ["transformers", "tokenizers", "orjson"] and row["extra"] == "hf"


def test_each_hugging_face_task_is_documented() -> None:
    assert task_examples().keys() == {task.handler for task in TASKS.values() if task.loader}


def test_each_task_has_a_template() -> None:
    assert {task.template for task in TASKS.values()} <= templates().keys()


@pytest.mark.parametrize(
    ("name", "handler"),
    [("token-classification", "token_classifier"), ("ner", "token_classifier"), ("reranker", "reranker"),
     ("sentiment-analysis", "text_classifier"), ("feature-extraction", "sentence_embedder")],
)  # fmt: skip
def test_a_task_is_known_by_each_of_its_names(name: str, handler: str) -> None:
    found = named(name)
    assert found is not None and found.handler == handler


def test_an_unknown_name_is_no_task() -> None:
    assert named("cooking") is None


@pytest.mark.parametrize(
    ("config", "handler"),
    [
        ({"architectures": ["BertForTokenClassification"]}, "token_classifier"),
        ({"architectures": ["LlamaForCausalLM"]}, "text_generator"),
        ({"architectures": ["GPT2LMHeadModel"]}, "text_generator"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "text_generator"),
        ({"architectures": ["MarianMTModel"], "model_type": "marian"}, "text_generator"),
        ({"architectures": ["RobertaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "text_classifier"),
        ({"architectures": ["RobertaForSequenceClassification"], "id2label": {"0": "ENTAILMENT", "1": "x"}},
         "zero_shot_classifier"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, "reranker"),
        ({"architectures": ["BertForQuestionAnswering"]}, "question_answerer"),
        ({"architectures": ["BertForMaskedLM"]}, "fill_mask"),
        ({"architectures": ["MPNetModel"]}, "sentence_embedder"),
    ],
)  # fmt: skip
def test_the_task_is_guessed_from_the_configuration(config: dict, handler: str) -> None:
    found = guessed(config).task
    assert found is not None and found.handler == handler


@pytest.mark.parametrize("config", [{}, {"architectures": ["GPT2LMHeadModelX"]}])
def test_what_cannot_be_guessed_has_a_reason(config: dict) -> None:
    found = guessed(config)
    assert found.task is None and found.why


def test_an_encoder_with_a_pooling_is_an_embedder() -> None:
    found = guessed({"architectures": ["BertForMaskedLM"]}, pools=True).task
    assert found is not None and found.handler == "sentence_embedder"
