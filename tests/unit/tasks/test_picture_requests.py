"""Requests for pictures: forms, limits, statuses, streams, and what is no picture."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_worker import farthest, opened, started
from task_worker import Worker
from vision_worker import photo, text

from diffusion_models import pipeline_folder, safety_checker
from documents import python_answer, same_form, schema_problems, task_examples
from torchserve_openvino.errors import BlankPictureError, ModelLoadError
from torchserve_openvino.generation.graph_calls import GraphCalls
from torchserve_openvino.generation.images.pictures import _picture
from torchserve_openvino.generation.images.pipeline_graphs import SafetyGraph, SafetyStandIn
from torchserve_openvino.serving.requests.messages import Request
from torchserve_openvino.tasks.pictures.handler import ImageGenerator

OPENAI = "v1/images/generations"


@pytest.fixture(scope="module")
def worker(tmp_path_factory) -> Any:
    place = tmp_path_factory.mktemp("sd")
    return started(place, pipeline_folder("sd", place / "saved"), max_images=3, guided="always")


def headed(worker: Any, *requests: tuple[Any, dict[str, str]]) -> list[Any]:
    """Answers a batch of requests with headers."""
    bodies, headers = zip(*requests, strict=True)
    return worker.made.handle_with(worker.handler, bodies, [{"explain": "False", **each} for each in headers])


def test_each_form_of_a_request_makes_the_same_picture(worker) -> None:
    forms = [
        {"prompt": "a cat", "seed": 5, "steps": 2, "guidance": 3},
        {"inputs": "a cat", "parameters": {"seed": 5, "num_inference_steps": 2, "guidance_scale": 3.0}},
        json.dumps({"prompt": "a cat", "parameters": {"seed": 5}, "steps": 2, "guidance": 3}).encode(),
        {"prompt": "a cat", "seed": 5, "steps": 2, "guidance": 3, "width": 32, "height": 32},
    ]
    answers = worker(*forms)
    assert all(answer == answers[0] and worker.status(place) == 200 for place, answer in enumerate(answers))
    assert worker.made.context.get_response_content_type(0) == "image/png"
    assert opened(answers[0]).size == (32, 32) and opened(answers[0]).text == {"seed": "5"}
    bare = worker.one(b"a cat")
    assert opened(bare).size == (32, 32)


def test_a_seed_makes_the_same_picture_in_any_company(worker) -> None:
    one = {"prompt": "a cat", "seed": 6, "steps": 2}
    alone = worker.one(one)
    beside = worker({"prompt": "a dog", "seed": 9, "steps": 3}, one, {"prompt": "a", "size": "48x32"})
    assert beside[1] == alone and beside[0] != alone
    several = worker.one({"prompt": "a cat", "seed": 5, "steps": 2, "n": 3})
    assert [each["seed"] for each in several["data"]] == [5, 6, 7]
    assert farthest(opened(several["data"][1]["b64_json"]), opened(alone)) == 0
    assert schema_problems("image_generator", "answer", several) == []
    random = [worker.one({"prompt": "a cat", "steps": 1, "response_format": "b64_json"}) for _ in range(2)]
    seeds = [each["data"][0]["seed"] for each in random]
    assert seeds[0] != seeds[1]
    again = worker.one({"prompt": "a cat", "steps": 1, "response_format": "b64_json", "seed": seeds[0]})
    assert again["data"] == random[0]["data"]


PHOTO = text(photo(32, 32))
REFUSED = [
    ({"prompt": "a", "steps": 9}, "steps is 9; the most is 8 (handler.openvino.image_generation.max_steps)"),
    ({"prompt": "a", "steps": 3, "scheduler": "pndm"}, "steps is 3; this scheduler makes 4 at least"),
    ({"prompt": "a", "n": 4}, "n is 4; one request gets 3 pictures at most"),
    ({"prompt": "a", "size": "64x64"}, "size is 64x64; this model makes 32x32, 48x32"),
    ({"prompt": "a", "size": "big"}, "a size is width x height in pixels, such as 512x512, not 'big'"),
    ({"prompt": "a", "width": 32}, "width and height belong together"),
    ({"prompt": "a", "width": 32, "height": 32, "size": "32x32"}, "exclude each other"),
    ({"prompt": "a", "seed": -1}, "parameters.seed"),
    ({"prompt": "a", "guidance": "nan"}, "parameters.guidance"),
    ({"prompt": "a", "guidence": 1}, "unknown parameter 'guidence'"),
    ({"prompt": "a", "scheduler": "eulr"}, "Did you mean 'euler'?"),
    ({"prompt": "a", "steps": 2, "num_inference_steps": 2}, "are the same; send one"),
    ({"prompt": "a", "steps": 2, "parameters": {"steps": 3}}, "'steps' stands both beside the prompt"),
    ({"prompt": "a", "guidance": 1}, "this model is compiled for guidance above 1"),
    ({"prompt": "a", "strength": 0.5}, "strength needs image"),
    ({"prompt": "a", "mask_image": PHOTO}, "mask_image needs image"),
    ({"prompt": "a", "image": PHOTO, "strength": 0.01}, "strength 0.01 of 3 steps makes no step"),
    ({"prompt": "a", "image": text(photo(40, 32))}, "image has 40x32 pixels; send 32x32, 48x32, or name the size"),
    ({"prompt": "a", "image": PHOTO, "mask_image": text(photo(40, 32))}, "mask_image has 40 x 32 pixels"),
    ({"prompt": "a", "image": "???"}, "not base64 of a picture"),
    ({"prompt": "a", "n": 2, "response_format": "png"}, "2 pictures do not fit into one PNG"),
    ({"prompt": "a", "stream": True, "response_format": "png"}, "leave response_format out"),
    ({"prompt": "many letters " * 9}, "tokens; this model reads 24"),
    ({"prompt": "a", "negative_prompt": "many letters " * 9}, "negative_prompt has 101 tokens; this model reads 24"),
    ({"prompt": "a" * 30_000}, "30000 characters"),
    ({"prompt": " "}, "prompt is empty"),
    ({"prompt": 7}, "prompt must be a text, not a number"),
    ({"inputs": ["a", "b"]}, "2 inputs in one request"),
    ({"inputs": ["a"]}, "inputs is a list"),
    ({"inputs": {"a": 1}}, "inputs is an object"),
    ({"steps": 3}, 'the JSON object needs "inputs" or prompt'),
    ({"inputs": "a cat", "params": {"steps": 3}}, "no field 'params'. Did you mean 'parameters'"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_is_refused_says_why_and_costs_no_other(worker, body, message) -> None:
    good = {"prompt": "a cat", "seed": 1, "steps": 1}
    alone = worker.one(good)
    answers = worker(good, body, good)
    assert [worker.status(place) for place in (0, 2)] == [200, 200] and answers[0] == answers[2] == alone
    assert worker.status(1) in {400, 413} and message in answers[1]["message"], answers[1]
    assert worker.report()["serving"]["compiles_after_ready"] == 0


def test_a_picture_of_another_size_is_stretched_on_request(worker) -> None:
    large = photo(96, 64)
    answer = worker.one({"prompt": "a cat", "image": text(large), "size": "48x32", "seed": 1})
    assert opened(answer).size == (48, 32)


def test_nan_is_an_error(worker) -> None:
    answers = worker({"prompt": "a", "guidance": 3e38, "seed": 0, "steps": 3}, {"prompt": "a", "steps": 1})
    assert worker.status(0) == 500 and answers[0]["type"] == "BlankPictureError" and "NaN" in answers[0]["message"]
    assert worker.status(1) == 200


def test_black_is_an_error() -> None:
    with pytest.raises(BlankPictureError, match="black all over"):
        _picture(torch.full((1, 3, 8, 8), 1e-4))
    assert np.array(_picture(torch.full((1, 3, 8, 8), 0.01))).max() == 3


@pytest.mark.slow
@pytest.mark.parametrize(("value", "message"), [(float("nan"), "NaN"), (-50.0, "black all over")])
def test_a_model_that_makes_no_pictures_is_refused_before_ready(tmp_path: Path, value: float, message: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = pipeline_folder("sd", tmp_path / "saved")
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["decoder.conv_out.bias"] = torch.full_like(weights["decoder.conv_out.bias"], value)
    save_file(weights, path)
    with pytest.raises(ModelLoadError, match=f"makes no picture of 32x32: .*{message}"):
        started(tmp_path, folder, sizes=["32x32"], guided="always", image_to_image=False)


# --- OpenAI's form ------------------------------------------------------------------------------------------------


def test_openais_form(worker) -> None:
    body = {"prompt": "a cat", "model": "x", "n": 2, "size": "auto", "user": "me", "seed": 5, "steps": 2}
    (answer,) = headed(worker, (body, {"url_path": OPENAI}))
    assert worker.status() == 200 and len(answer["data"]) == 2 and isinstance(answer["created"], int)
    plain = worker.one({"prompt": "a cat", "seed": 5, "steps": 2})
    assert farthest(opened(answer["data"][0]["b64_json"]), opened(plain)) == 0
    (single,) = headed(worker, ({"prompt": "a cat", "size": "48x32"}, {"url_path": f"/{OPENAI}/"}))
    assert opened(single["data"][0]["b64_json"]).size == (48, 32)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "a", "response_format": "url"}, 400, "parameters.response_format"),
        ({"prompt": "a", "quality": "hd"}, 400, "parameters.quality"),
        ({"prompt": "a", "size": "1024x1024"}, 400, "this model makes 32x32, 48x32"),
        ({"inputs": "a"}, 400, "prompt"),
        ({"prompt": "a", "guidance": 3e38, "seed": 0}, 500, "NaN"),
    ],
)
def test_openais_errors(worker, body, status, message) -> None:
    (answer,) = headed(worker, (body, {"url_path": OPENAI}))
    assert worker.status() == status and message in answer["error"]["message"]
    assert answer["error"]["type"] == ("server_error" if status == 500 else "invalid_request_error")


def test_other_paths_and_explanations(worker) -> None:
    body = {"prompt": "a", "steps": 1}
    answers = headed(worker, (body, {"url_path": "v1/models"}), (body, {"explain": "True"}), (body, {}))
    assert [worker.status(place) for place in range(3)] == [404, 501, 200]
    assert OPENAI in answers[0]["message"]


def test_an_envelope_gets_json(worker) -> None:
    from torchserve_openvino.serving.torchserve.calls import answered_call

    made = worker.made
    made.handle(worker.handler, {"prompt": "a", "steps": 1})
    rows = [{"body": {"instances": [{"prompt": "a cat", "seed": 5, "steps": 2}, {"prompt": "a", "stream": True}]}}]
    (answer,) = answered_call(worker.handler._openvino, rows, made.context, "kserve")
    first, second = answer["predictions"]
    assert first["data"][0]["seed"] == 5 and second["code"] == 400 and worker.status() == 207


# --- streams ------------------------------------------------------------------------------------------------------


@pytest.fixture
def wire(worker) -> Iterator[socket.socket]:
    """The frontend's end of the worker's connection."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    worker.made.context.cl_socket = ours
    yield theirs
    ours.close()
    theirs.close()
    del worker.made.context.cl_socket


def events(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = re.findall(rb"event: (\S+)\ndata: (\{.*?\})\n\n", raw)
    return [(name.decode(), json.loads(data)) for name, data in found]


def test_a_stream_tells_of_each_step(worker, wire) -> None:
    other = {"prompt": "a dog", "seed": 4, "steps": 1}
    answers = worker({"prompt": "a cat", "seed": 5, "steps": 2, "n": 2, "stream": True}, other)
    told = events(wire.recv(1 << 20))
    assert [name for name, _ in told] == [
        *["image_generation.progress"] * 2, "image_generation.completed", *["image_generation.progress"] * 2,
    ]  # fmt: skip
    steps = [(facts["picture"], facts["step"], facts["steps"]) for _, facts in told if "step" in facts]
    assert steps == [(1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2)]
    ((name, last),) = events(answers[0].encode())
    assert name == "image_generation.completed" and answers[0].endswith("data: [DONE]\n\n")
    plain = worker.one({"prompt": "a cat", "seed": 6, "steps": 2})
    assert last["seed"] == 6 and farthest(opened(last["b64_json"]), opened(plain)) == 0
    assert answers[1] == worker.one(other)


def test_a_stream_that_fails_says_so_in_its_last_event(worker, wire) -> None:
    (answer,) = worker({"prompt": "a", "guidance": 3e38, "seed": 0, "steps": 2, "stream": True})
    assert len(events(wire.recv(1 << 20))) == 2
    ((name, facts),) = events(answer.encode())
    assert name == "image_generation.error" and "NaN" in facts["error"]["message"]
    refused = worker.one({"prompt": "a", "steps": 99, "stream": True})
    assert worker.status() == 400 and refused["code"] == 400


def test_a_stream_needs_http(worker) -> None:
    from ts.utils.util import PredictionException

    with pytest.raises(PredictionException, match="needs HTTP"):
        worker.made.handle_with(worker.handler, [{"prompt": "a", "stream": True}], [{}])


# --- safety checker -----------------------------------------------------------------------------------------------


def test_the_safety_checker_flags_as_its_own_forward() -> None:
    torch.manual_seed(1)
    checker = safety_checker(0.35)
    standing = SafetyStandIn(checker, {"safety": GraphCalls(SafetyGraph(checker))})
    flags = []
    with torch.no_grad():
        for seed in range(12):
            torch.manual_seed(seed)
            pixels, images = torch.randn(1, 3, 32, 32), torch.rand(1, 3, 8, 8)
            _, expected = checker(clip_input=pixels, images=images.clone())
            same, found = standing(images=images, clip_input=pixels)
            assert found == expected and same is images
            flags += found
    assert len(set(flags)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("threshold", "status"), [(2.0, 200), (-2.0, 422)])
def test_the_folders_safety_checker_runs(tmp_path: Path, threshold: float, status: int) -> None:
    folder = pipeline_folder("sd", tmp_path / "saved", threshold=threshold)
    worker = started(tmp_path, folder, sizes=["32x32"], guided="always", image_to_image=False)
    answer = worker.one({"prompt": "a cat", "steps": 2})
    assert worker.status() == status
    assert isinstance(answer, bytes) if status == 200 else "safety checker flags" in answer["message"]
    worker.ran_compiled()
    report = worker.report()
    assert report["config"]["components"]["safety_checker"]["coverage"] == 1.0
    assert any("checked by the folder's safety checker" in note for note in report["notes"])


# --- configuration and documents ----------------------------------------------------------------------------------


def test_the_report_states_that_there_is_no_safety_checker(worker) -> None:
    report = worker.report()
    assert any("no safety checker" in note for note in report["notes"])
    assert report["config"]["image_generation"]["sizes"] == ["32x32", "48x32"]
    assert "guidance" in report["task"]["parameters"]["properties"]


def test_settings_of_other_tasks_are_refused(tmp_path: Path, worker) -> None:
    openvino = {"release_weights": True}
    with pytest.raises(ModelLoadError, match="handler.openvino.release_weights has no use here"):
        Worker(tmp_path / "archive", ImageGenerator, worker.folder, openvino)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"sizes": ["33x32"]}, "33x32 is not a multiple of 2 pixels"),
        ({"max_steps": 2000}, "max_steps is 2000; the scheduler has 1000"),
        ({"default_steps": 9}, "default_steps is 9, more than max_steps 8"),
        ({"guided": "never", "guidance": 5}, "guided: never needs a guidance at most 1"),
        ({"sizes": ["large"]}, "must be auto or a list of sizes such as 512x512"),
    ],
)
def test_a_configuration_that_cannot_be_served_says_why(tmp_path: Path, worker, section, message) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        started(tmp_path, worker.folder, **section)


def test_the_documented_request_gets_an_answer_of_the_documented_form(worker) -> None:
    request, shown = task_examples()["image_generator"]
    (body,) = re.findall(r"-d '([^']+)'", request)
    assert schema_problems("image_generator", "request", json.loads(body)) == []
    answer = worker.one({**json.loads(body), "steps": 2})
    assert worker.status() == 200 and same_form(answer, shown), answer

    def respond(sent: Any) -> Any:
        import httpx

        return worker.respond(httpx.Request("POST", sent.url, json=json.loads(sent.content) | {"steps": 2}))

    assert python_answer("image_generator", respond)["data"] == answer["data"]


def test_nobody_s_picture_is_not_made_to_its_end(worker) -> None:
    steps: list[int] = []

    def is_gone() -> bool:
        steps.append(1)
        return len(steps) > 2

    request = Request({"body": {"prompt": "a cat", "steps": 8, "n": 3}}, {"explain": "False"}, is_gone=is_gone)
    (answer,) = worker.handler._openvino.answer([request])
    assert answer.status == 503 and "hung up" in str(answer.error) and len(steps) == 3
    assert worker.one({"prompt": "a cat", "steps": 2, "seed": 1})


def test_openais_null_is_no_value(worker) -> None:
    body = {"prompt": "a cat", "n": None, "stream": None, "size": None}
    (answer,) = headed(worker, (body, {"url_path": OPENAI}))
    assert worker.status() == 200 and len(answer["data"]) == 1
