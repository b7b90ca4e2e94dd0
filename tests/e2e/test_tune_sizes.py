"""The sizes of requests as the tuner sees them where they reach the model, in texts and recordings."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import transformers

from hub_audio_models import audio_model, encoded, recording
from hub_models import text_model
from torchserve_openvino.bench.bodies import read_folder
from torchserve_openvino.tune.archive_worker import LoadedArchive
from torchserve_openvino.tune.archives import Variants
from torchserve_openvino.tune.first_stage import FirstStage
from torchserve_openvino.tune.settings import Settings
from torchserve_openvino.tune.trial import environment_for

CONFIG = "pt2: {compile: {enable: %s, backend: openvino}}\nhandler: {openvino: {%s}}\n"
TEXTS = ["yes", "the train leaves at noon", "nobody knows why it never came back " * 4]


def packed(folder: Path, model: Path, keys: str, *options: str, compiled: bool = True) -> None:
    (folder / "model-config.yaml").write_text(CONFIG % (str(compiled).lower(), keys))
    command = [sys.executable, "-m", "torchserve_openvino.cli", "package", "--hf", model, "--model-name", "net"]
    command += ["--config-file", "model-config.yaml", "--export-path", ".", *options]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def stage_of(folder: Path, model: Path, keys: str, *options: str) -> FirstStage:
    packed(folder, model, keys, *options)
    (folder / "scratch").mkdir()
    variants, bodies = Variants(folder / "net.mar", folder / "scratch"), read_folder(folder / "requests")
    environment = environment_for(folder / "cache")
    return FirstStage(variants, bodies, Settings(length_counts=[2]), 2, environment, lambda text: None)


def test_texts_are_seen_in_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model("text_classifier", tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokens = [len(tokenizer(text)["input_ids"]) for text in TEXTS]
    (tmp_path / "requests").mkdir()
    for number, body in enumerate([TEXTS[0], TEXTS[1], TEXTS]):
        (tmp_path / "requests" / f"{number}.json").write_text(json.dumps({"inputs": body}))
    # What the processes unpack is removed with them.
    (tmp_path / "unpacked").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "unpacked"))
    stage = stage_of(tmp_path, model, "text: {lengths: [128]}", "--task", "text_classifier")
    (lengths,) = stage.sizes.lengths
    assert (lengths.key, lengths.compiled) == ("text.lengths", [128])
    # Texts of one request are seen one by one, without the padding between them.
    assert sorted(lengths.seen) == sorted([tokens[0], tokens[1], *tokens])
    assert stage.sizes.rows == [1, 1, 3]
    names = [str(option) for option in stage.fitted()]
    assert any(name.startswith("text.lengths [") and name.endswith("128]") for name in names)
    assert 'batching.mode "dynamic"' in names and any(name.startswith("batching.buckets") for name in names)
    assert list((tmp_path / "unpacked").iterdir()) == []


@pytest.mark.parametrize("compiled", [True, False])
def test_what_notes_sizes_is_in_no_compiled_model(compiled: bool, tmp_path: Path) -> None:
    model = text_model("text_classifier", tmp_path / "saved")
    (tmp_path / "requests").mkdir()
    for number, body in enumerate(TEXTS):
        (tmp_path / "requests" / f"{number}.json").write_text(json.dumps({"inputs": body}))
    keys = "text: {lengths: [64]}, batching: {mode: dynamic}"
    packed(tmp_path, model, keys, "--task", "text_classifier", compiled=compiled)
    bodies = [body.named for body in read_folder(tmp_path / "requests")]
    worker = LoadedArchive(tmp_path / "net.mar", bodies)
    assert [answer["status"] for answer in worker.answers()] == [200] * len(TEXTS)
    report = worker.report()
    assert report["graph_breaks"] == [] and report["fallbacks"] == []
    # They are noted where the model runs in eager PyTorch.
    assert bool(worker.sizes()["lengths"]) is not compiled


def test_recordings_are_seen_in_seconds(tmp_path: Path) -> None:
    model = audio_model("Wav2Vec2ForSequenceClassification", tmp_path / "saved")
    (tmp_path / "requests").mkdir()
    for seconds in (1.2, 2.0, 6.5):
        (tmp_path / "requests" / f"{seconds}.wav").write_bytes(encoded(recording(seconds)))
    stage = stage_of(tmp_path, model, "audio: {max_seconds: 10, lengths: [10]}", "--task", "audio_classifier")
    (lengths,) = stage.sizes.lengths
    assert (lengths.key, sorted(lengths.seen), lengths.compiled) == ("audio.lengths", [2, 2, 7], [10])
    assert "audio.lengths [2, 7, 10]" in [str(option) for option in stage.fitted()]
