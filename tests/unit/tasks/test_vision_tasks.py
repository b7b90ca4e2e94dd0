"""Vision tasks in a worker in this process, against transformers' own pipelines in eager PyTorch."""

import base64
import functools
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from serving_worker import Archive

import hub_vision_models
from hub_vision_models import LABELS, vision_model
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.tasks.vision.classifier import HubImageClassifier
from torchserve_openvino.tasks.vision.depth import DepthEstimator
from torchserve_openvino.tasks.vision.detector import ObjectDetector
from torchserve_openvino.tasks.vision.embedder import ImageEmbedder
from torchserve_openvino.tasks.vision.segmenter import ImageSegmenter
from torchserve_openvino.tasks.vision.zero_shot import ZeroShotImageClassifier

HANDLERS = {
    each.task: each
    for each in (
        HubImageClassifier, ImageSegmenter, ObjectDetector, DepthEstimator, ZeroShotImageClassifier, ImageEmbedder,
    )
}  # fmt: skip


def photo(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture with coarse random colours, so that resizing does not turn it grey."""
    pixels = np.random.default_rng(seed).integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height)).convert(mode)


def encoded(picture: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **how)
    return buffer.getvalue()


def text(picture: Image.Image) -> str:
    return base64.b64encode(encoded(picture)).decode()


def asked(picture: Image.Image, **parameters: Any) -> dict[str, Any]:
    return {"inputs": text(picture), "parameters": parameters}


def unpacked(png: str) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(base64.b64decode(png)))).astype(np.int64))


PHOTOS = [photo(60, 40), photo(40, 75, 1), photo(130, 33, 2), photo(51, 50, 3)]


class Worker:
    """A handler for a saved model, and the batches that it answers."""

    def __init__(self, place: Path, task: str, folder: Path, **openvino: Any) -> None:
        config = {"handler": {"openvino": {"batching": {"buckets": [2]}, **openvino}}}
        self.made, self.folder = Archive(place, config, None, batch_size=4), folder
        shutil.copytree(folder, place / "hub")
        self.handler = HANDLERS[task]()
        threads = torch.get_num_threads()
        try:
            self.handler.initialize(self.made.context)
        finally:
            torch.set_num_threads(threads)

    def __call__(self, *bodies: Any) -> list[Any]:
        return self.made.handle(self.handler, *bodies)

    def one(self, body: Any) -> Any:
        (answer,) = self(body)
        return answer

    def status(self, position: int = 0) -> int:
        return self.made.status(position)

    def ran_compiled(self) -> None:
        report = self.handler.describe_handle()
        assert report["summary"]["coverage"] == 1.0 and report["fallbacks"] == []
        assert report["verify"]["passed"] and report["serving"]["compiles_after_ready"] == 0

    def pipeline(self, name: str, **how: Any) -> Any:
        return transformers.pipeline(name, model=str(self.folder), device="cpu", **how)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Worker]:
    """One worker for each task, shared by the tests of a process: loading one takes seconds."""

    @functools.cache
    def of(task: str) -> Worker:
        place = tmp_path_factory.mktemp(task)
        return Worker(place / "archive", task, vision_model(task, place / "saved"))

    return of


def near(value: Any) -> Any:
    return pytest.approx(value, abs=2e-3)


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


# Random weights are sure of nothing.
THRESHOLD = 0.15


def boxes_of(answer: list[dict[str, Any]]) -> list[tuple[str, float, list[float]]]:
    return [
        (next(name for name in each if name != "score"), each["score"], next(iter(each.values()))) for each in answer
    ]


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


def test_a_detector_with_a_mask_is_padded_as_its_processor_pads(tmp_path) -> None:
    worker = Worker(tmp_path / "archive", "object_detector", hub_vision_models.masked_detector(tmp_path / "saved"))
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


def test_vectors_of_a_classifier_are_its_cls_token(tmp_path) -> None:
    folder = vision_model("hub_image_classifier", tmp_path / "saved")
    worker = Worker(tmp_path / "archive", "image_embedder", folder)
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    with torch.no_grad():
        found = model.vit(**processor(images=PHOTOS[0], return_tensors="pt")).last_hidden_state[0, 0]
    torch.testing.assert_close(torch.tensor(worker.one(encoded(PHOTOS[0]))), found, atol=2e-3, rtol=0)


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
    worker = Worker(tmp_path / "archive", "hub_image_classifier", folder, image=limits)
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
            Worker(tmp_path / str(number), task, folder)
    with pytest.raises(ModelLoadError, match="48 x 48; the model's ViTImageProcessorPil makes them 32 x 32"):
        Worker(tmp_path / "x", "hub_image_classifier", classifier, warmup={"inputs": [{"shape": [3, 48, 48]}]})
    with pytest.raises(ModelLoadError, match="may only state the size"):
        Worker(tmp_path / "y", "hub_image_classifier", classifier, warmup={"inputs": [{"shape": [48]}]})


def test_a_detector_that_keeps_the_aspect_ratio_takes_the_size_of_the_yaml(tmp_path) -> None:
    folder = hub_vision_models.detector(tmp_path / "saved", {"shortest_edge": 32, "longest_edge": 64})
    worker = Worker(tmp_path / "archive", "object_detector", folder, warmup={"inputs": [{"shape": [3, 32, 48]}]})
    fixed = hub_vision_models.detector(tmp_path / "fixed")
    reference = transformers.pipeline("object-detection", model=str(fixed), device="cpu")(
        PHOTOS[1], threshold=THRESHOLD
    )
    found = boxes_of(worker.one(asked(PHOTOS[1], threshold=THRESHOLD)))
    assert [(each["label"], near(each["score"])) for each in reference] == [(a, b) for a, b, _ in found] != []
    worker.ran_compiled()


@pytest.mark.parametrize("task", sorted(HANDLERS))
def test_the_catalogue_guesses_the_task(task, tmp_path) -> None:
    from torchserve_openvino.serving.loading.hub import read_config
    from torchserve_openvino.tasks.catalog import TASKS, guessed, named

    found = guessed(read_config(vision_model(task, tmp_path / "saved"))).task
    assert found is not None and found.handler == task
    assert named(TASKS[task].hub) is TASKS[task]
