"""scripts/predict.py: what it sends, and how it shows each kind of answer."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import typer
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

import predict
from answers.pictures import drawn

# More than what is enlarged, so that a pixel of the answer is one of the drawing.
WIDTH, HEIGHT = 600, 400
BOXES = [{"car": [100.0, 100.0, 300.0, 200.0], "score": 0.91}, {"[MASK]": [10.0, 300.0, 60.0, 390.0], "score": 0.6}]


def png(array: Any) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(array, np.uint8)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


HALVES = np.repeat([[0, 3]], WIDTH // 2, axis=1).repeat(HEIGHT, axis=0)
RAMP = np.tile(np.linspace(0, 255, WIDTH), (HEIGHT, 1))
DEPTH = {"predicted_depth": png(RAMP), "depth": png(RAMP), "min": 0.4, "max": 9.1}


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "street.png"
    Image.new("RGB", (WIDTH, HEIGHT), "grey").save(path)
    return path


Ask = Callable[..., tuple[Result, dict[str, Any]]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs the script against a server that gives one answer; returns its result, and what it sent."""

    def run(answer: Any, *arguments: Any, status: int = 200) -> tuple[Result, dict[str, Any]]:
        sent: dict[str, Any] = {}

        def post(url: str, **how: Any) -> httpx.Response:
            sent.update(how, url=url)
            return answer if isinstance(answer, httpx.Response) else httpx.Response(status, json=answer)

        monkeypatch.setattr(httpx, "post", post)
        app = typer.Typer()
        app.command()(predict.main)
        return CliRunner().invoke(app, list(map(str, arguments))), sent

    return run


def test_boxes_are_drawn_where_they_are(ask, photo, tmp_path) -> None:
    out = tmp_path / "boxes.png"
    done, sent = ask(BOXES, "detr", photo, "--out", out)
    assert done.exit_code == 0, done.output
    assert sent["content"] == photo.read_bytes() and sent["url"].endswith("/predictions/detr")
    assert "car" in done.stdout and "[MASK]" in done.stdout and "0.9100" in done.stdout and "wrote" in done.stdout
    picture = np.array(Image.open(out).convert("RGB")).astype(int)
    assert picture.shape == (HEIGHT, WIDTH, 3)
    grey = picture[5, 5].tolist()
    assert picture[150, 200].tolist() == grey and picture[150, 100].tolist() != grey == picture[150, 90].tolist()
    assert picture[200, 200].tolist() != grey and picture[150, 300].tolist() != grey


def test_classes_are_an_overlay_with_a_legend(ask, photo, tmp_path) -> None:
    answers = [
        {"label_map": png(HALVES), "labels": {"0": "road", "3": "tree"}},
        # As TorchServe's own segmenter answers, in the size of the model's input.
        [[[0.0, 0.9], [3.0, 0.8]], [[0.0, 0.9], [3.0, 0.8]]],
    ]
    pictures = []
    for number, answer in enumerate(answers):
        out = tmp_path / f"{number}.png"
        done, _ = ask(answer, "seg", photo, "--out", out)
        assert done.exit_code == 0 and "50.0%" in done.stdout, done.output
        pictures.append(np.array(Image.open(out)).astype(int))
        left, right = pictures[-1][200, 100], pictures[-1][200, 500]
        assert left.tolist() != right.tolist()
        # The legend stands beside the photo, which keeps its size.
        assert pictures[-1].shape[1] > WIDTH and (pictures[-1][:, WIDTH:] < 128).any()
    assert (pictures[0][:, :WIDTH] == pictures[1][:, :WIDTH]).all()
    done, _ = ask(answers[0], "seg", photo)
    assert "road" in done.stdout and "tree" in done.stdout


def test_depth_is_colored_above_its_scale(ask, photo, tmp_path) -> None:
    done, _ = ask(DEPTH, "depth", photo)
    assert done.exit_code == 0 and "0.4" in done.stdout and "9.1" in done.stdout and "iVBOR" not in done.stdout
    made = tmp_path / "street-depth.png"
    picture = np.array(Image.open(made)).astype(int)
    assert picture.shape[0] > HEIGHT and picture.shape[1] == WIDTH
    brightness = picture[:HEIGHT].sum(axis=2)[10]
    assert (np.diff(brightness[::50]) > 0).all()


def test_a_photo_is_turned_upright_as_the_server_does(tmp_path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.jpg"
    Image.new("RGB", (WIDTH, HEIGHT)).save(path, exif=exif)
    found = drawn(BOXES, Image.open(path))
    assert found is not None and found[0].size == (HEIGHT, WIDTH)


def test_a_small_photo_is_enlarged_with_its_boxes() -> None:
    found = drawn([{"car": [10, 10, 30, 20], "score": 0.5}], Image.new("RGB", (60, 40)))
    assert found is not None and found[0].size == (480, 320)
    picture = np.array(found[0])
    assert picture[100, 80].any() and not picture[120, 160].any()


@pytest.mark.parametrize("answer", [
    {"glad": 0.9, "calm": 0.1}, [{"label": "dog", "score": 0.9}], [0.1, 0.2], [[0.1, 0.2]], [], "text", None, {},
    [[{"label": "dog", "score": 0.9}]], {"x": 1, "code": "a"},
])  # fmt: skip
def test_other_answers_are_tables(ask, photo, tmp_path, answer) -> None:
    done, _ = ask(answer, "model", photo)
    assert done.exit_code == 0, done.output
    assert list(tmp_path.iterdir()) == [photo]
    done, _ = ask(answer, "model", photo, "--out", tmp_path / "out.png")
    assert done.exit_code == 1 and "nothing to draw" in done.stderr


def test_an_empty_list_is_shown(ask) -> None:
    assert ask([], "detr", "a text")[0].stdout.strip() == "[]"


def test_json_is_the_answer_alone(ask, photo, tmp_path) -> None:
    done, _ = ask(BOXES, "detr", photo, "--json")
    assert json.loads(done.stdout) == BOXES and list(tmp_path.iterdir()) == [photo]
    done, _ = ask(BOXES, "detr", photo, "--json", "--out", tmp_path / "out.png")
    assert json.loads(done.stdout) == BOXES and (tmp_path / "out.png").is_file()


def test_the_input_is_never_overwritten(ask, photo, tmp_path) -> None:
    before = photo.read_bytes()
    (tmp_path / "link.png").symlink_to(photo)
    for out in (photo, tmp_path / "link.png"):
        done, sent = ask(BOXES, "detr", photo, "--out", out)
        assert done.exit_code == 2 and "the input itself" in done.output and not sent
    assert photo.read_bytes() == before


@pytest.mark.parametrize(("out", "message"), [("out.txt", "no ending of a picture"), ("no/out.png", "no folder")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_asked(ask, photo, tmp_path, out, message) -> None:
    done, sent = ask(BOXES, "detr", photo, "--out", tmp_path / out)
    assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split()) and not sent


def test_a_version_is_no_folder(ask, photo, tmp_path) -> None:
    assert ask(BOXES, "detr/2.0", photo)[0].exit_code == 0
    assert (tmp_path / "street-detr-2.0.png").is_file()


def test_a_photo_with_parameters_goes_as_base64(ask, photo) -> None:
    _, sent = ask(BOXES, "detr", photo, "--parameters", '{"threshold": 0.2}', "--json")
    body = json.loads(sent["content"])
    assert base64.b64decode(body["inputs"]) == photo.read_bytes() and body["parameters"] == {"threshold": 0.2}
    _, sent = ask([], "bert", "Größe", "--parameters", "{}")
    assert json.loads(sent["content"])["inputs"] == "Größe"


def test_a_refusal_is_an_error(ask, photo, tmp_path) -> None:
    done, _ = ask({"code": 400, "message": "no picture"}, "detr", photo, "--out", tmp_path / "out.png", status=400)
    assert done.exit_code == 1 and "400: no picture" in done.stderr and not (tmp_path / "out.png").exists()


def test_the_help_has_examples(ask) -> None:
    shown = ask(None, "--help")[0].output
    assert "predict.py detr street.jpg --out boxes.png" in shown and "PHOTO-MODEL.png" in shown


def test_a_picture_that_is_the_answer_is_written(ask, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = base64.b64decode(png(np.full((8, 8, 3), 90)))
    answer = httpx.Response(200, content=content, headers={"content-type": "image/png"})
    done, sent = ask(answer, "painter", "a cat", "--parameters", '{"seed": 7}')
    assert done.exit_code == 0 and "wrote painter.png" in done.stdout, done.output
    assert (tmp_path / "painter.png").read_bytes() == content
    assert json.loads(sent["content"]) == {"inputs": "a cat", "parameters": {"seed": 7}}
    done, _ = ask(answer, "painter", "a cat", "--out", tmp_path / "cat.jpg")
    assert done.exit_code == 0 and Image.open(tmp_path / "cat.jpg").format == "JPEG"
    done, _ = ask(answer, "painter", "a cat", "--json")
    assert done.exit_code == 1 and "b64_json" in done.output
