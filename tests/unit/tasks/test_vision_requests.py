"""Vision tasks in a worker in this process: unusual pictures, requests and models that are wrong."""

import io
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from vision_worker import (
    HANDLERS,
    PHOTOS,
    THRESHOLD,
    Worker,
    asked,
    boxes_of,
    encoded,
    near,
    photo,
    started,
    text,
    workers,
)

import hub_vision_models
from hub_vision_models import vision_model
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.loading.hub import read_config
from torchserve_openvino.tasks.catalog import TASKS, guessed, named


@pytest.fixture(scope="module")
def serve(tmp_path_factory) -> Callable[[str], Worker]:
    return workers(tmp_path_factory)


# --- pictures of all kinds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("picture", [photo(50, 3), photo(3, 50), photo(1, 1), photo(40, 60, mode="L"),
                                     photo(40, 60, mode="RGBA"), photo(40, 60, mode="P")],
                         ids=["3 high", "3 wide", "one pixel", "grey", "alpha", "palette"])  # fmt: skip
def test_unusual_pictures_are_read_as_the_pipeline_reads_them(serve, picture) -> None:
    worker = serve("hub_image_classifier")
    # The pipeline takes a picture of height 3 for one whose channels come first, unless it is a PIL image.
    expected = {each["label"]: each["score"] for each in worker.pipeline("image-classification")(picture)}
    assert worker.one(encoded(picture)) == near(expected)


def test_pictures_are_turned_upright(serve) -> None:
    worker = serve("hub_image_classifier")
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(PHOTOS[0], "JPEG", exif=exif, quality=95)
    picture = Image.open(io.BytesIO(turned))
    expected = {each["label"]: each["score"] for each in worker.pipeline("image-classification")(picture)}
    assert worker.one(turned) == near(expected)
    plain = worker.one(encoded(PHOTOS[0], "JPEG", quality=95))
    assert plain != near(expected)


# --- requests that are wrong ----------------------------------------------------------------------------------


def test_each_bad_request_gets_its_own_status(serve) -> None:
    worker = serve("hub_image_classifier")
    good = encoded(PHOTOS[0])
    cases: list[tuple[Any, int, str]] = [
        (good, 200, ""),
        (b"", 400, "no body"),
        (b"no picture", 415, "not an image"),
        (encoded(photo(200, 200))[:-200], 400, "damaged"),
        ({"inputs": "###"}, 400, "not base64"),
        ({"inputs": 7}, 400, "not int"),
        ({"inputs": None}, 400, "not null"),
        ({"inputs": []}, 400, "empty list"),
        ({"input": "x"}, 400, "'input'"),
        ({"inputs": text(PHOTOS[0]), "parameters": {"topk": 1}}, 400, "'top_k'"),
        ({"inputs": text(PHOTOS[0]), "parameters": {"top_k": 0}}, 400, "parameters.top_k"),
        (encoded(photo(1, 900)), 400, "1 x 900"),
        ({"inputs": ["x"] * 65}, 413, "65 inputs"),
        (b'{"inputs": "' + b"A" * 50_000_000 + b'"}', 413, "bytes"),
    ]
    answers = worker(*(body for body, _, _ in cases))
    for position, (answer, (_, status, part)) in enumerate(zip(answers, cases, strict=True)):
        assert worker.status(position) == status, answer
        assert not part or part in answer["message"], answer
    assert answers[0] == near(worker.one(good))


def test_limits_of_pictures_hold(tmp_path) -> None:
    folder = vision_model("hub_image_classifier", tmp_path / "saved")
    limits = {"max_pixels": 3000, "max_bytes": 20_000}
    worker = started(tmp_path / "archive", "hub_image_classifier", folder, image=limits)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8))
    small = encoded(PHOTOS[0])
    worker(small, encoded(photo(60, 60)), encoded(noise), {"inputs": text(noise)}, {"inputs": [text(PHOTOS[0])]})
    assert [worker.status(i) for i in range(5)] == [200, 413, 413, 413, 200]


def test_a_list_is_answered_by_a_list_with_a_status_for_each(serve) -> None:
    worker = serve("hub_image_classifier")
    (answer, single) = worker({"inputs": [text(PHOTOS[0]), "AAAA", text(PHOTOS[1])]}, encoded(PHOTOS[1]))
    assert worker.status(0) == 207 and worker.status(1) == 200
    assert answer[1]["code"] == 415 and answer[2] == near(single)


def test_json_in_bytes_is_read(serve) -> None:
    worker = serve("hub_image_classifier")
    body = f' {{"inputs": "{text(PHOTOS[0])}", "parameters": {{"top_k": 1}}}}'.encode()
    url = f"data:image/png;base64,{text(PHOTOS[0])}".encode()
    answers = worker(body, {"b64": text(PHOTOS[0])}, encoded(PHOTOS[0]), url)
    assert list(answers[0]) == list(answers[1])[:1]
    assert answers[1] == near(answers[2]) and answers[3] == near(answers[2])


# --- models that are wrong --------------------------------------------------------------------------------------


def test_models_that_cannot_be_served_are_refused(tmp_path) -> None:
    classifier = vision_model("hub_image_classifier", tmp_path / "classifier")
    bare = tmp_path / "bare"
    shutil.copytree(classifier, bare)
    (bare / "preprocessor_config.json").unlink()
    keeps = hub_vision_models.detector(tmp_path / "keeps", {"shortest_edge": 32, "longest_edge": 64})
    for number, (task, folder, message) in enumerate((
        ("object_detector", classifier, "AutoModelForObjectDetection cannot load"),
        ("hub_image_classifier", bare, "no preprocessor_config.json"),
        ("object_detector", keeps, r"keeps the aspect ratio.*warmup.inputs: \[\{shape: \[3, 64, 64\]\}\]"),
        ("zero_shot_image_classifier", classifier, "cannot load"),
    )):  # fmt: skip
        with pytest.raises(ModelLoadError, match=message):
            started(tmp_path / str(number), task, folder)
    with pytest.raises(ModelLoadError, match="48 x 48; the model's ViTImageProcessorPil makes them 32 x 32"):
        started(tmp_path / "x", "hub_image_classifier", classifier, warmup={"inputs": [{"shape": [3, 48, 48]}]})
    with pytest.raises(ModelLoadError, match="may only state the size"):
        started(tmp_path / "y", "hub_image_classifier", classifier, warmup={"inputs": [{"shape": [48]}]})


@pytest.mark.slow
def test_a_detector_that_keeps_the_aspect_ratio_takes_the_size_of_the_yaml(tmp_path) -> None:
    folder = hub_vision_models.detector(tmp_path / "saved", {"shortest_edge": 32, "longest_edge": 64})
    worker = started(tmp_path / "archive", "object_detector", folder, warmup={"inputs": [{"shape": [3, 32, 48]}]})
    fixed = hub_vision_models.detector(tmp_path / "fixed")
    reference = transformers.pipeline("object-detection", model=str(fixed), device="cpu")(
        PHOTOS[1], threshold=THRESHOLD
    )
    found = boxes_of(worker.one(asked(PHOTOS[1], threshold=THRESHOLD)))
    assert [(each["label"], near(each["score"])) for each in reference] == [(a, b) for a, b, _ in found] != []
    worker.ran_compiled()


@pytest.mark.parametrize("task", sorted(HANDLERS))
def test_the_catalog_guesses_the_task(task, tmp_path) -> None:
    found = guessed(read_config(vision_model(task, tmp_path / "saved"))).task
    assert found is not None and found.handler == task
    assert named(TASKS[task].hub) is TASKS[task]
