"""Vision tasks in a worker in this process, against transformers' own pipelines in eager PyTorch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from vision_worker import (
    HANDLERS,
    PHOTOS,
    THRESHOLD,
    Worker,
    asked,
    boxes_of,
    encoded,
    near,
    started,
    text,
    unpacked,
    workers,
)

import hub_vision_models
from documents import python_answer, same_form, schema_problems, task_examples
from hub_vision_models import LABELS, vision_model
from torchserve_openvino.serving import precision
from torchserve_openvino.tasks.scores import class_scores


@pytest.fixture(scope="module")
def serve(tmp_path_factory) -> Callable[[str], Worker]:
    return workers(tmp_path_factory)


def test_classifier_answers_as_the_pipeline_does(serve) -> None:
    worker = serve("hub_image_classifier")
    reference = worker.pipeline("image-classification")
    first, second, third, fourth = PHOTOS
    answers = worker(
        encoded(first), {"data": text(second)}, {"inputs": "data:image/png;base64," + text(third)},
        asked(fourth, top_k=2),
    )  # fmt: skip
    for answer, picture, top_k in zip(answers, PHOTOS, (5, 5, 5, 2), strict=True):
        expected = {each["label"]: each["score"] for each in reference(picture, top_k=top_k)}
        assert list(answer) == list(expected) and answer == near(expected)
    worker.ran_compiled()


def test_segmenter_answers_in_the_format_of_torchserve(serve) -> None:
    worker = serve("image_segmenter")
    model = transformers.AutoModelForSemanticSegmentation.from_pretrained(worker.folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(worker.folder)
    for answer, picture in zip(worker(*map(encoded, PHOTOS)), PHOTOS, strict=True):
        with torch.no_grad():
            logits = model(**processor(images=picture, return_tensors="pt")).logits
        # What ts/torch_handler/image_segmenter.py does with a model's output of the input's size.
        grown = torch.nn.functional.interpolate(logits, size=(32, 48), mode="bilinear", align_corners=False)
        best = torch.max(torch.nn.functional.softmax(grown, dim=1), dim=1)
        expected = torch.stack([best.indices.type(best.values.dtype), best.values], dim=3)[0]
        got = torch.tensor(answer)
        assert got.shape == (32, 48, 2)
        assert (got[..., 0] == expected[..., 0]).float().mean() > 0.999
        torch.testing.assert_close(got[..., 1], expected[..., 1], atol=2e-3, rtol=0)
    worker.ran_compiled()


def test_segmenter_returns_a_label_map_of_the_size_of_the_picture(serve) -> None:
    worker = serve("image_segmenter")
    reference = worker.pipeline("image-segmentation")
    for answer, picture in zip(worker(*(asked(each, format="png") for each in PHOTOS)), PHOTOS, strict=True):
        found = unpacked(answer["label_map"])
        assert found.shape == (picture.height, picture.width)
        masks = {each["label"]: torch.from_numpy(np.array(each["mask"])) > 0 for each in reference(picture)}
        assert sorted(masks) == sorted(answer["labels"].values())
        for number, label in answer["labels"].items():
            assert ((found == int(number)) == masks[label]).float().mean() > 0.999


def test_detector_finds_the_boxes_of_the_pipeline(serve) -> None:
    worker = serve("object_detector")
    model = transformers.AutoModelForObjectDetection.from_pretrained(worker.folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(worker.folder)
    reference = worker.pipeline("object-detection")
    for answer, picture in zip(worker(*(asked(each, threshold=THRESHOLD) for each in PHOTOS)), PHOTOS, strict=True):
        with torch.no_grad():
            out = model(pixel_values=processor(images=picture, return_tensors="pt")["pixel_values"])
        (expected,) = processor.post_process_object_detection(
            out, threshold=THRESHOLD, target_sizes=[(picture.height, picture.width)]
        )
        found = boxes_of(answer)
        assert found and [label for label, _, _ in found] == [LABELS[i] for i in expected["labels"].tolist()]
        assert [score for _, score, _ in found] == near(expected["scores"].tolist())
        got = torch.tensor([box for _, _, box in found])
        torch.testing.assert_close(got, expected["boxes"], atol=0.1, rtol=0)
        theirs = reference(picture, threshold=THRESHOLD)
        assert [each["label"] for each in theirs] == [label for label, _, _ in found]
        assert got == pytest.approx(torch.tensor([list(each["box"].values()) for each in theirs]), abs=1.1)
    assert worker.one(asked(PHOTOS[0], threshold=1.0)) == []
    worker.ran_compiled()


@pytest.mark.slow
def test_a_detector_with_a_mask_is_padded_as_its_processor_pads(tmp_path) -> None:
    worker = started(tmp_path / "archive", "object_detector", hub_vision_models.masked_detector(tmp_path / "saved"))
    model = transformers.AutoModelForObjectDetection.from_pretrained(worker.folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(worker.folder)
    given = processor(images=PHOTOS, return_tensors="pt", pad_size={"height": 64, "width": 64})
    with torch.no_grad():
        out = model(**given)
    sizes = [(each.height, each.width) for each in PHOTOS]
    expected = processor.post_process_object_detection(out, threshold=0.1, target_sizes=sizes)
    for answer, wanted in zip(worker(*(asked(each, threshold=0.1) for each in PHOTOS)), expected, strict=True):
        found = boxes_of(answer)
        assert found and [label for label, _, _ in found] == [LABELS[i] for i in wanted["labels"].tolist()]
        assert [score for _, score, _ in found] == near(wanted["scores"].tolist())
        torch.testing.assert_close(torch.tensor([box for _, _, box in found]), wanted["boxes"], atol=0.1, rtol=0)
    worker.ran_compiled()


@pytest.mark.slow
def test_depth_is_that_of_the_pipeline(serve) -> None:
    worker = serve("depth_estimator")
    reference = worker.pipeline("depth-estimation")
    answers = worker(*(asked(each, format="list") for each in PHOTOS))
    packed = worker(*map(encoded, PHOTOS))
    for answer, small, picture in zip(answers, packed, PHOTOS, strict=True):
        expected = reference(picture)
        depth = expected["predicted_depth"]
        span = float(depth.max() - depth.min())
        assert span > 0
        torch.testing.assert_close(torch.tensor(answer["predicted_depth"]), depth, atol=2e-3 * span, rtol=1e-3)
        image = torch.from_numpy(np.array(expected["depth"]).astype(np.int64))
        for each in (answer, small):
            assert (unpacked(each["depth"]) - image).abs().max() <= 1
        scaled = unpacked(small["predicted_depth"]) / 65535 * (small["max"] - small["min"]) + small["min"]
        torch.testing.assert_close(scaled.float(), depth, atol=2e-3 * span, rtol=1e-3)
    worker.ran_compiled()


@pytest.mark.slow
def test_zero_shot_answers_as_the_pipeline_does(serve) -> None:
    worker = serve("zero_shot_image_classifier")
    reference = worker.pipeline("zero-shot-image-classification")
    labels = ["a cat", "two dogs in a house", "rain", "a cat"]
    for given in ({}, {"hypothesis_template": "{}, seen from above"}):
        for count in (4, 1, 3):
            some = labels[:count]
            answers = worker(*(asked(each, candidate_labels=some, **given) for each in PHOTOS))
            for answer, picture in zip(answers, PHOTOS, strict=True):
                expected = reference(picture, candidate_labels=some, **given)
                assert [each["label"] for each in answer] == [each["label"] for each in expected]
                assert [each["score"] for each in answer] == near([each["score"] for each in expected])
    worker.ran_compiled()
    parts = worker.handler.describe_handle()["serving"]["shapes"]["parts"]
    assert parts["texts"]["frozen"] > 0 and "attention_mask" in parts["texts"]["declared"]


@pytest.mark.slow
def test_labels_of_earlier_requests_are_not_computed_again(serve, monkeypatch) -> None:
    worker = serve("zero_shot_image_classifier")
    request = asked(PHOTOS[0], candidate_labels=["sun", "moon"])
    first = worker.one(request)
    monkeypatch.setattr(worker.handler, "texts", None)
    assert worker.one(request) == first


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ({}, "candidate_labels"),
        ({"candidate_labels": []}, "candidate_labels"),
        ({"candidate_labels": [" "]}, "empty label"),
        ({"candidate_labels": ["a"], "hypothesis_template": "{0.__class__}"}, "hypothesis_template"),
        ({"candidate_labels": ["word " * 40]}, "tokens; this model takes 24"),
        ({"candidate_labels": ["x"] * 257}, "257 candidate_labels"),
    ],
)
def test_unusable_labels_are_refused(serve, parameters, part) -> None:
    worker = serve("zero_shot_image_classifier")
    answer = worker.one(asked(PHOTOS[0], **parameters))
    assert worker.status() == (413 if "257" in part else 400) and part in answer["message"]


def test_vectors_are_the_pooled_output(serve) -> None:
    worker = serve("image_embedder")
    reference = worker.pipeline("image-feature-extraction", pool=True)
    got = torch.tensor(worker(*map(encoded, PHOTOS)))
    expected = torch.tensor([reference(each)[0] for each in PHOTOS])
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=0)
    one = torch.tensor(worker.one(asked(PHOTOS[0], normalize=True)))
    torch.testing.assert_close(one, got[0] / got[0].norm(), atol=1e-5, rtol=0)
    worker.ran_compiled()


@pytest.mark.slow
def test_vectors_of_a_classifier_are_its_cls_token(tmp_path) -> None:
    folder = vision_model("hub_image_classifier", tmp_path / "saved")
    worker = started(tmp_path / "archive", "image_embedder", folder)
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    with torch.no_grad():
        found = model.vit(**processor(images=PHOTOS[0], return_tensors="pt")).last_hidden_state[0, 0]
    torch.testing.assert_close(torch.tensor(worker.one(encoded(PHOTOS[0]))), found, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("multi_label_classification", [0.7311, 0.5, 0.2689]),
        ("single_label_classification", [0.6652, 0.2447, 0.09]),
        (None, [0.6652, 0.2447, 0.09]),
        ("regression", [1.0, 0.0, -1.0]),
    ],
)
def test_scores_depend_on_the_kind_of_problem(problem, expected) -> None:
    config = transformers.PretrainedConfig(problem_type=problem, num_labels=3)
    assert class_scores(config, torch.tensor([1.0, 0.0, -1.0])) == pytest.approx(expected, abs=1e-3)


def test_samples_of_the_archive_are_answered_before_ready(tmp_path) -> None:
    folder = vision_model("hub_image_classifier", tmp_path / "saved")
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "photo.png").write_bytes(encoded(PHOTOS[0]))
    worker = started(tmp_path / "archive", "hub_image_classifier", folder, warmup={"samples": ["photo.png"]})
    assert len(worker.one(encoded(PHOTOS[1]))) == 5
    worker.ran_compiled()


@pytest.mark.parametrize("task", HANDLERS)
def test_answers_have_the_documented_form(serve, task, tmp_path, monkeypatch) -> None:
    labels = {"candidate_labels": ["cat", "dog"]} if task == "zero_shot_image_classifier" else {}
    answer = serve(task).one(asked(PHOTOS[0], **labels))
    assert same_form(answer, task_examples()[task][1]), answer
    monkeypatch.chdir(tmp_path)
    for name in ("cat.jpg", "street.jpg"):
        Path(name).write_bytes(encoded(PHOTOS[0]))
    assert python_answer(task, serve(task).respond) == answer
    assert schema_problems(task, "answer", answer) == []


@pytest.mark.parametrize(
    ("task", "parameters"),
    [("image_segmenter", {"format": "png"}), ("depth_estimator", {"format": "list"}),
     ("object_detector", {"threshold": THRESHOLD})],
)  # fmt: skip
def test_other_forms_of_answers_are_those_of_the_schema(serve, task, parameters) -> None:
    body = asked(PHOTOS[0], **parameters)
    assert schema_problems(task, "request", body) == []
    answer = serve(task).one(body)
    assert answer and schema_problems(task, "answer", answer) == []


@pytest.mark.parametrize("task", ["object_detector", "zero_shot_image_classifier"])
def test_auto_judges_bf16_by_what_users_read(tmp_path, monkeypatch, task) -> None:
    if "BF16" not in precision.device_capabilities("CPU"):
        pytest.skip("needs a CPU with bf16")
    monkeypatch.setattr(precision, "no_bf16x3", lambda device: "is not tried here.")
    monkeypatch.setattr(precision, "timed_pairs", lambda first, second, seconds: [1.5] * 20)
    worker = started(tmp_path / "archive", task, vision_model(task, tmp_path / "saved"), precision="auto")
    tried = worker.handler.describe_handle()["config"]["precision_choice"]["tried"]["bf16"]
    assert tried["measure"]["name"] == "probability" and tried["measure"]["bound"] == 0.02


def test_a_picture_tower_with_a_projection_answers_projected_vectors(tmp_path: Path) -> None:
    config = transformers.CLIPVisionConfig(**hub_vision_models.SMALL, image_size=32, patch_size=8, projection_dim=12)
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    make = transformers.CLIPVisionModelWithProjection
    folder = hub_vision_models.save(tmp_path / "saved", lambda: make(config), processor)
    worker = started(tmp_path, "image_embedder", folder)
    features = processor(images=PHOTOS[0], return_tensors="pt")
    with torch.no_grad():
        expected = make.from_pretrained(folder).eval()(**features).image_embeds[0]
    assert len(expected) == 12
    assert worker.one(encoded(PHOTOS[0])) == near(expected.tolist())


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_weights_of_half_the_size_are_served_in_float32(tmp_path: Path, kind: torch.dtype) -> None:
    folder = vision_model("hub_image_classifier", tmp_path / "saved")
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).to(kind)
    model.save_pretrained(folder)
    worker = started(tmp_path, "hub_image_classifier", folder)
    reference = transformers.pipeline("image-classification", model=model.float(), image_processor=str(folder))
    expected = {each["label"]: each["score"] for each in reference(PHOTOS[0], top_k=5)}
    assert worker.one(encoded(PHOTOS[0])) == near(expected)
