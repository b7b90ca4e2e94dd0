"""Audio tasks in a worker in this process, against transformers' own pipelines in eager PyTorch."""

import base64
import functools
import io
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch
import transformers
from task_worker import Worker

from documents import python_answer, same_form, schema_problems, task_examples
from hub_audio_models import RATE, audio_model, encoded, lively, recording, wav2vec2_config
from torchserve_openvino.config.sections.openvino_section import OpenVINOSection
from torchserve_openvino.errors import InvalidInputError, ModelLoadError, PayloadTooLargeError
from torchserve_openvino.serving.shapes.plan import shapes_of
from torchserve_openvino.tasks.audio.audio_handler import AudioHead
from torchserve_openvino.tasks.audio.classifier import AudioClassifier
from torchserve_openvino.tasks.audio.recognizer import SpeechRecognizer
from torchserve_openvino.tasks.audio.sound import RecordingLimits, samples_of
from torchserve_openvino.tasks.catalog import guessed

HANDLERS = {each.task: each for each in (AudioClassifier, SpeechRecognizer)}
CLASSES = {"audio_classifier": "Wav2Vec2ForSequenceClassification", "speech_recognizer": "Wav2Vec2ForCTC"}
SECONDS = (0.3, 1.7, 0.9, 0.31)
RECORDINGS = [recording(seconds, seed) for seed, seconds in enumerate(SECONDS)]
# What 16-bit files hold.
HEARD = [np.round(samples * 32767).astype(np.int16) for samples in RECORDINGS]
FILES = [encoded(samples, kind=("WAV", "FLAC")[number % 2]) for number, samples in enumerate(HEARD)]
ARRAYS = [(samples / np.float32(32768)).astype(np.float32) for samples in HEARD]


def started(
    place: Path, task: str, folder: Path, *, batching: Any = None, samples: Sequence[bytes] = (), **audio: Any
) -> Worker:
    names = [f"sample{number}" for number in range(len(samples))]
    openvino = {
        "warmup": {"samples": names},
        "audio": {"max_seconds": 2.0, "max_bytes": 200_000, **audio},
        "batching": batching if batching is not None else {"buckets": [4]},
    }
    files = dict(zip(names, samples, strict=True))
    return Worker(place / "archive", HANDLERS[task], folder, openvino, batch_size=2, samples=files)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Worker]:
    """One worker for each task and kind of model, shared by the tests of a process: loading one takes seconds."""

    @functools.cache
    def of(task: str, norm: str = "layer") -> Worker:
        place = tmp_path_factory.mktemp(f"{task}-{norm}")
        return started(place, task, audio_model(CLASSES[task], place / "saved", norm=norm))

    return of


@functools.cache
def pipeline(task: str, folder: Path) -> Any:
    return transformers.pipeline(task, model=str(folder), device="cpu")


def close(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compares classifications: labels in the same order, scores within the tolerance."""
    assert [each["label"] for each in got] == [each["label"] for each in expected]
    assert [each["score"] for each in got] == pytest.approx([each["score"] for each in expected], abs=2e-3)


# Models that take a mask, and others, which would need a worker more.
each_norm = pytest.mark.parametrize("norm", ["layer", pytest.param("group", marks=pytest.mark.slow)])

# --- answers ----------------------------------------------------------------------------------------------------


@each_norm
def test_audio_classifier_answers_as_the_pipeline_does(serve, norm) -> None:
    worker = serve("audio_classifier", norm)
    reference = pipeline("audio-classification", worker.folder)
    for got, samples in zip(worker(*FILES), ARRAYS, strict=True):
        close(got, reference(samples, top_k=5))
        assert len(got) == 5
    assert len({round(answer[0]["score"], 3) for answer in worker(*FILES)}) > 1
    worker.ran_compiled()


@pytest.mark.slow
@each_norm
def test_speech_recognizer_answers_as_the_pipeline_does(serve, norm) -> None:
    worker = serve("speech_recognizer", norm)
    reference = pipeline("automatic-speech-recognition", worker.folder)
    answers = worker(*FILES)
    assert answers == [reference(samples.copy()) for samples in ARRAYS]
    assert all(len(answer["text"]) > 3 for answer in answers)
    worker.ran_compiled()


@each_norm
def test_nothing_is_compiled_for_any_length(serve, norm) -> None:
    worker = serve("speech_recognizer", norm)
    reference = pipeline("automatic-speech-recognition", worker.folder)
    shortest = worker.handler.shortest
    lengths = [shortest, shortest + 1, shortest + 127, shortest + 128, 1000, 7777, RATE, RATE + 1, 2 * RATE]
    sounds = [ARRAYS[1][:n] if n <= len(ARRAYS[1]) else np.tile(ARRAYS[1], 2)[:n] for n in lengths]
    bodies = [encoded(sound, subtype="FLOAT") for sound in sounds]
    assert worker(*bodies) == [reference(sound.copy()) for sound in sounds]
    assert worker(*bodies[3:5], *bodies[3:5]) == [reference(sound.copy()) for sound in (sounds[3:5] * 2)]
    worker.ran_compiled()
    refused = worker.one(encoded(sounds[0][:-1], subtype="FLOAT"))
    assert worker.status() == 400 and f"needs {shortest}" in refused["message"]


@pytest.mark.slow
def test_lengths_without_padding(tmp_path) -> None:
    folder = audio_model(CLASSES["speech_recognizer"], tmp_path / "saved", norm="group")
    worker = started(tmp_path, "speech_recognizer", folder, batching={"mode": "dynamic"})
    report = worker.report()
    assert report["summary"]["coverage"] == 1.0 and report["verify"]["passed"]
    reference = pipeline("automatic-speech-recognition", folder)
    assert worker(*FILES) == [reference(samples.copy()) for samples in ARRAYS]


def test_the_shortest_length_of_a_graph_for_all_lengths_is_one_that_the_model_takes() -> None:
    found = {}
    for name, network in (("takes 1", torch.nn.Identity()), ("needs 10", torch.nn.Conv1d(1, 2, 10))):
        section = OpenVINOSection.model_validate({
            "batching": {"mode": "dynamic", "dims": {"samples": [10, 64]}},
            "warmup": {"inputs": [{"shape": [1, "samples"]}]},
        })  # fmt: skip
        declared = section.warmup.inputs
        shapes = shapes_of(network.eval(), section, batch_size=1, streams=1, declared=declared, samples=())
        found[name] = sorted({signature.dims["samples"] for signature in shapes.signatures})
    assert found == {"takes 1": [1, 32, 64], "needs 10": [10, 32, 64]}


@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "UniSpeechSat"])
@pytest.mark.parametrize("norm", ["layer", "group"])
def test_a_masked_recording_is_answered_as_alone(kind, norm) -> None:
    config = wav2vec2_config(norm).to_dict() | {"model_type": None}
    torch.manual_seed(0)
    names = getattr(transformers, f"{kind}Config")
    model = lively(getattr(transformers, f"{kind}ForSequenceClassification")(names(**config)))
    alone = torch.from_numpy(ARRAYS[2])[None]
    padded = torch.nn.functional.pad(alone, (0, 7000))
    mask = (torch.arange(padded.shape[1]) < alone.shape[1]).long()[None]
    with torch.no_grad():
        expected, changed = model(alone).logits, model(padded).logits
        found = AudioHead(model, masks=True)(padded, mask)
    assert not torch.allclose(changed, expected, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_rates_and_channels_of_one_batch_may_differ(serve) -> None:
    worker = serve("audio_classifier")
    reference = pipeline("audio-classification", worker.folder)
    bodies, wanted = [], []
    for number, (rate, kind) in enumerate(((8_000, "WAV"), (44_100, "FLAC"), (48_000, "WAV"))):
        left, right = (np.round(recording(0.8, seed, rate) * 32767).astype(np.int16) for seed in (number, number + 7))
        bodies.append(encoded(np.stack([left, right], axis=1), rate, kind))
        mono = ((left / np.float32(32768) + right / np.float32(32768)) / 2).astype(np.float32)
        wanted.append(reference(soxr.resample(mono, rate, RATE), top_k=5))
    for got, expected in zip(worker(*bodies), wanted, strict=True):
        close(got, expected)


@pytest.mark.slow
def test_recordings_come_as_base64_and_in_lists(serve) -> None:
    worker = serve("audio_classifier")
    plain = worker(*FILES[:2])
    texts = [base64.b64encode(file).decode() for file in FILES[:2]]
    url = "data:audio/wav;base64," + texts[0]
    answers = worker(
        {"inputs": texts[0]},
        {"inputs": url, "parameters": {"top_k": 2}},
        {"inputs": [*texts, "!"]},
        json.dumps({"inputs": texts[1]}).encode(),
        texts[1],
    )
    assert [worker.status(i) for i in range(5)] == [200, 200, 207, 200, 200]
    close(answers[0], plain[0])
    close(answers[1], plain[0][:2])
    close(answers[2][0], plain[0])
    close(answers[2][1], plain[1])
    assert answers[2][2]["code"] == 400
    close(answers[3], plain[1])
    close(answers[4], plain[1])


@pytest.mark.slow
def test_features_of_a_fixed_shape(tmp_path) -> None:
    folder = audio_model("ASTForAudioClassification", tmp_path / "saved")
    worker = started(tmp_path, "audio_classifier", folder)
    reference = pipeline("audio-classification", folder)
    for got, samples in zip(worker(*FILES), ARRAYS, strict=True):
        close(got, reference(samples, top_k=5))
    worker.ran_compiled()


@pytest.mark.slow
def test_independent_labels_and_samples_in_the_archive(tmp_path) -> None:
    folder = audio_model(CLASSES["audio_classifier"], tmp_path / "saved", problem_type="multi_label_classification")
    texts = [base64.b64encode(file).decode() for file in (FILES[0], FILES[2])]
    bodies = [FILES[0], json.dumps({"inputs": texts}).encode()]
    worker = started(tmp_path, "audio_classifier", folder, lengths=[1], max_seconds=1.0, samples=bodies)
    worker.ran_compiled()
    reference = pipeline("audio-classification", folder)
    close(worker.one({"inputs": texts[0], "parameters": {"top_k": 50}}), reference(ARRAYS[0], top_k=None))
    with pytest.raises(ModelLoadError, match=r"sample0 is not a request.*longest is 1 s \(.*audio\.max_seconds\)"):
        started(tmp_path / "2", "audio_classifier", folder, lengths=[1], max_seconds=1.0, samples=[FILES[1]])


# --- requests that are wrong ------------------------------------------------------------------------------------


def claims(file: bytes, seconds: float) -> bytes:
    """A 16-bit WAV file whose header states another length."""
    place = file.index(b"data") + 4
    return file[:place] + struct.pack("<I", int(seconds * RATE) * 2) + file[place + 4 :]


def flac_claims(file: bytes, samples: int) -> bytes:
    """A FLAC file whose header states another number of samples, in the last 36 bits of these 8 bytes."""
    word = int.from_bytes(file[18:26], "big") >> 36 << 36 | samples
    return file[:18] + word.to_bytes(8, "big") + file[26:]


def test_each_bad_request_gets_its_own_status(serve) -> None:
    worker = serve("audio_classifier")
    not_a_number = ARRAYS[0].copy()
    not_a_number[7] = np.nan
    bad = [
        (claims(FILES[0], 36_000), 413, "36000.0 s; the longest is 2 s (handler.openvino.audio.max_seconds)"),
        (flac_claims(FILES[1], 36_000 * RATE), 413, "36000.0 s"),
        (encoded(recording(2.1)), 413, "2.1 s; the longest is 2 s"),
        (encoded(recording(4.0), kind="FLAC"), 413, "4.0 s"),
        (encoded(recording(1.9, rate=96_000), rate=96_000), 413, "bytes; the most is 200000"),
        ({"inputs": "A" * 400_000}, 413, "audio.max_bytes"),
        ({"inputs": [""] * 17}, 413, "17 inputs"),
        (FILES[0][:-100], 400, "cut off"),
        (FILES[1][: len(FILES[1]) // 2], 400, "damaged"),
        (flac_claims(FILES[1], 0), 400, "does not state its length"),
        (FILES[0][:20], 400, "no samples"),
        (b"", 400, "no body"),
        (encoded(np.zeros(0, np.int16)), 400, "empty"),
        ({"inputs": ""}, 400, "empty"),
        (encoded(not_a_number, subtype="FLOAT"), 400, "NaN"),
        ({"inputs": "not base64"}, 400, "base64"),
        ({"inputs": 7}, 400, "int"),
        ({"inputs": {"array": [0.1, 0.2]}}, 400, "dict"),
        ({"recording": ""}, 400, "'recording'"),
        ({"inputs": "", "parameters": {"topk": 1}}, 400, "'top_k'"),
        (b"Good morning, this is a text and no recording.", 415, "not a recording"),
        (b"\x89PNG\r\n\x1a\n" + bytes(200), 415, "not a recording"),
    ]
    answers = worker(FILES[0], *(body for body, _, _ in bad))
    assert worker.status(0) == 200
    for number, ((_, status, part), answer) in enumerate(zip(bad, answers[1:], strict=True), 1):
        assert (worker.status(number), part in answer["message"]) == (status, True), answer
    close(answers[0], worker.one(FILES[0]))


def mp3(samples: np.ndarray, mode: str = "VARIABLE") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 44_100, format="MP3", bitrate_mode=mode)
    return file.getvalue()


def without_table(file: bytes) -> bytes:
    """An MP3 file without its first frame, which has the table of contents."""
    return file[file.index(b"\xff\xfb", 4) :]


LOUD, QUIET = recording(4.0, 1, rate=44_100), recording(4.0, 2, rate=44_100) * 1e-4
ENOUGH = RecordingLimits(20.0, 1 << 24)


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
@pytest.mark.parametrize("rate", [RATE, 22_050])
def test_compressed_recordings_are_heard_whole(mode: str, rate: int) -> None:
    file = mp3(np.concatenate([LOUD, QUIET, LOUD]), mode)
    tags = b"ID3\x04\x00\x00\x00\x00\x00\x08" + b"\xff\xfb\x90\x64" * 2
    for whole in (file, tags + file + b"TAG" + bytes(125)):
        assert len(samples_of(whole, rate, ENOUGH)) == 12 * rate


@pytest.mark.parametrize(
    ("file", "message"),
    [
        # What libsndfile takes for their lengths is 2, 4 and 30 seconds.
        (without_table(mp3(np.concatenate([LOUD, QUIET]))), "has 8.0 s, and its header"),
        (mp3(LOUD) + mp3(LOUD), "has 8.2 s, and its header 4.0 s"),
        (mp3(LOUD)[: len(mp3(LOUD)) // 2], "cut off: its header states 4.0 s"),
        *(
            (form[: len(form) // 2], "cut off")
            for kind in ("AIFF", "AU", "RF64", "W64", "OGG")
            for form in [encoded(np.round(LOUD * 32767).astype(np.int16), kind=kind)]
        ),
        (encoded(RECORDINGS[0], kind="OGG") * 2, "several recordings, one after the other"),
        (FILES[0][:12] + b"LIST\0\0\0\0" * 20_000 + FILES[0][12:], "this WAV file has no samples"),
    ],
)
def test_recordings_that_libsndfile_would_cut_are_refused(file: bytes, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        samples_of(file, RATE, ENOUGH)


def test_a_guess_that_is_too_long_is_no_reason_to_refuse() -> None:
    # libsndfile guesses 17 seconds by the silence at the beginning.
    file = without_table(mp3(np.concatenate([np.zeros(8 * 44_100, np.float32), LOUD])))
    assert abs(len(samples_of(file, RATE, RecordingLimits(13.0, 1 << 24))) - 12 * RATE) < 0.2 * RATE
    with pytest.raises(PayloadTooLargeError, match="more than .* the longest is 11 s"):
        samples_of(file, RATE, RecordingLimits(11.0, 1 << 24))


# --- models that are wrong --------------------------------------------------------------------------------------


def test_padding_that_changes_answers_is_refused(tmp_path) -> None:
    # The adapter's convolution sees the frames behind the recording.
    sizes = {"add_adapter": True, "num_adapter_layers": 1, "output_hidden_size": 32}
    folder = audio_model(CLASSES["speech_recognizer"], tmp_path / "saved", **sizes)
    with pytest.raises(ModelLoadError, match="samples cannot be padded.*exact or dynamic"):
        started(tmp_path, "speech_recognizer", folder)


@pytest.mark.slow
def test_parameters_of_models_that_write_token_by_token_are_refused(serve) -> None:
    worker = serve("speech_recognizer")
    text = base64.b64encode(FILES[0]).decode()
    answer, refused = worker(FILES[0], {"inputs": text, "parameters": {"language": "en"}})
    assert answer["text"] and worker.status(1) == 400
    assert "language is for models that write text token by token (Whisper)" in refused["message"]


def test_lengths_beyond_the_limit_are_refused(tmp_path) -> None:
    folder = audio_model(CLASSES["audio_classifier"], tmp_path / "saved")
    with pytest.raises(ModelLoadError, match=r"lengths has 4 s; the longest recording has 2 s"):
        started(tmp_path, "audio_classifier", folder, lengths=[1, 4])


@pytest.mark.parametrize(
    ("kind", "architecture", "task"),
    [
        ("wav2vec2", "Wav2Vec2ForSequenceClassification", "audio_classifier"),
        ("hubert", "HubertForSequenceClassification", "audio_classifier"),
        ("audio-spectrogram-transformer", "ASTForAudioClassification", "audio_classifier"),
        ("wavlm", "WavLMForCTC", "speech_recognizer"),
        ("wav2vec2", "Wav2Vec2Model", None),
        ("whisper", "WhisperForConditionalGeneration", "speech_recognizer"),
        ("whisper", "WhisperForAudioClassification", "audio_classifier"),
        ("bert", "BertForSequenceClassification", "text_classifier"),
        ("bert", "BertModel", "sentence_embedder"),
    ],
)
def test_tasks_are_guessed_from_the_type_of_model(kind, architecture, task) -> None:
    found = guessed({"model_type": kind, "architectures": [architecture], "id2label": {"0": "a", "1": "b"}})
    assert (found.task.handler if found.task else None) == task and found.why


@pytest.mark.parametrize("task", ["audio_classifier", "speech_recognizer"])
def test_answers_have_the_documented_form(serve, task, tmp_path, monkeypatch) -> None:
    answer = serve(task, "layer")(FILES[0])[0]
    assert same_form(answer, task_examples()[task][1]), answer
    monkeypatch.chdir(tmp_path)
    for name in ("bark.wav", "speech.flac"):
        Path(name).write_bytes(FILES[0])
    assert python_answer(task, serve(task, "layer").respond) == answer
    assert schema_problems(task, "answer", answer) == []
