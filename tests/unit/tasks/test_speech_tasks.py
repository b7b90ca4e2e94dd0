"""Whisper in a worker in this process, against transformers' own pipeline in eager PyTorch."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from task_worker import Worker

from documents import schema_problems
from hub_audio_models import encoded, recording
from speech_models import whisper
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.generation.speech.recordings import Segment, Transcript
from torchserve_openvino.tasks.audio.recognizer import SpeechRecognizer
from torchserve_openvino.tasks.request_body import parameters_of
from torchserve_openvino.tasks.speech import endpoints
from torchserve_openvino.tasks.speech.speech_parameters import SpeechParameters, flattened
from torchserve_openvino.tasks.speech.transcriber import Transcriber

pytestmark = pytest.mark.usefixtures("one_thread")

# Two are longer than the model's window of 2 s.
HEARD = [
    np.round(recording(seconds, seed) * 32767).astype(np.int16) for seed, seconds in enumerate((0.5, 3.1, 1.9, 4.4))
]
FILES = [encoded(samples, kind=("WAV", "FLAC")[number % 2]) for number, samples in enumerate(HEARD)]
ARRAYS = [(samples / np.float32(32768)).astype(np.float32) for samples in HEARD]
TRANSCRIPTIONS, TRANSLATIONS = endpoints.TRANSCRIPTIONS, endpoints.TRANSLATIONS


def started(place: Path, folder: Path, *, batching: Any = None, **section: Any) -> Worker:
    openvino = {
        "audio": {"max_seconds": 5.0, "max_bytes": 200_000},
        "batching": batching if batching is not None else {"buckets": [2]},
        "fallback": {"allow": [], "on_violation": "refuse"},
        "threads": 1,
        **section,
    }
    return Worker(place / "archive", SpeechRecognizer, folder, openvino, batch_size=2)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    place = tmp_path_factory.mktemp("whisper")
    return started(place, whisper(place / "saved"))


@pytest.fixture(scope="module")
def pipeline(worker: Worker) -> Any:
    return transformers.pipeline("automatic-speech-recognition", model=str(worker.folder), device="cpu")


def asked(file: bytes, **parameters: Any) -> dict[str, Any]:
    return {"inputs": base64.b64encode(file).decode(), "parameters": parameters}


def plain(answer: Any) -> Any:
    return json.loads(json.dumps(answer))


def test_answers_are_the_pipelines(worker: Worker, pipeline: Any) -> None:
    assert isinstance(worker.handler, Transcriber)
    greedy: dict[str, Any] = {"num_beams": 1}
    german = {"language": "german", "task": "translate", "max_new_tokens": 9}
    times = {"return_timestamps": True}
    bodies: list[Any] = [*FILES, *(asked(file, **times) for file in FILES)]
    bodies += [asked(FILES[0], generation_parameters=german), asked(FILES[1], **german | times)]
    wanted = [pipeline(array.copy(), generate_kwargs=greedy) for array in ARRAYS]
    wanted += [pipeline(array.copy(), **times, generate_kwargs=greedy) for array in ARRAYS]
    wanted += [pipeline(ARRAYS[0].copy(), generate_kwargs=greedy | german)]
    wanted += [pipeline(ARRAYS[1].copy(), **times, generate_kwargs=greedy | german)]
    answers = worker(*bodies)
    assert plain(answers) == plain(wanted)
    assert sum(len(answer["text"]) > 3 for answer in answers) > 5
    for answer in answers:
        assert schema_problems("speech_recognizer", "answer", plain(answer)) == []
    # Beams, which are rows more than the compiled batch.
    (found,) = worker(asked(FILES[2], num_beams=3))
    assert found == pipeline(ARRAYS[2].copy(), generate_kwargs={"num_beams": 3})


def test_the_report_says_what_was_compiled_and_compared(worker: Worker) -> None:
    worker.ran_compiled()
    report = plain(worker.report())
    assert set(report["config"]["components"]) == {"encoder", "sound", "decoder 1", "decoder 8"}
    assert report["summary"]["graphs"] == report["summary"]["partitions"] == 4
    found = report["generate"]
    assert found["passed"] and found["engine"] == "compile" and found["prompts"] == 7
    assert found["tokens_equal"] == found["tokens_compared"] > 100 and found["logits"]["least_cosine"] > 0.9999
    limits = report["task"]["limits"]
    assert limits["languages"] == ["de", "en", "fr"] and limits["window_seconds"] == 2 and limits["batches"] == [2]


BAD: list[tuple[Any, int, str]] = [
    (asked(FILES[0], return_timestamps="word"), 400, "times of each word are not served"),
    (asked(FILES[0], language="klingon"), 400, "language is 'klingon'; this model knows de, en, fr"),
    (asked(FILES[0], task="sing"), 400, "parameters.task"),
    (asked(FILES[0], max_new_tokens=99), 400, "max_new_tokens is 99; this model writes 40 tokens"),
    (asked(FILES[0], num_beams=11), 400, "parameters.num_beams"),
    (asked(FILES[0], temperature=-1), 400, "parameters.temperature"),
    (asked(FILES[0], temperature=0.5, num_beams=2), 400, "num_beams has no effect with a temperature above 0"),
    (
        {"inputs": ["AA=="] * 16, "parameters": {"prompt": "ab " * 40_000}},
        413,
        "tokenizer would read 1920000 characters",
    ),
    (asked(FILES[0], top_k=3), 400, "unknown parameter 'top_k'"),
    (asked(FILES[0], language="de", generate_kwargs={"language": "en"}), 400, "'language' stands both"),
    (asked(FILES[0], generate_kwargs=3), 400, "parameters.generate_kwargs must be an object"),
    (asked(FILES[0], prompt="<|en|>"), 400, "prompt: "),
    (encoded(recording(5.1)), 413, "5.1 s; the longest is 5 s"),
    (encoded(recording(0.01)), 400, "has 160 samples at 16000 Hz; this model needs 400"),
    (FILES[0][:-100], 400, "cut off"),
    (b"Good morning, this is a text and no recording.", 415, "not a recording"),
]


def test_each_bad_request_gets_its_own_status(worker: Worker) -> None:
    alone = worker.one(FILES[0])
    answers = worker(FILES[0], *(body for body, _, _ in BAD), FILES[0])
    assert answers[0] == answers[-1] == alone
    for place, ((_, status, message), answer) in enumerate(zip(BAD, answers[1:-1], strict=True), 1):
        assert (worker.status(place), message in answer["message"]) == (status, True), answer
    assert worker.report()["serving"]["compiles_after_ready"] == 0


def posted(worker: Worker, *requests: tuple[dict[str, Any], str]) -> list[Any]:
    """Answers a batch of forms, each at its path; an empty path is that of the model."""
    rows = [row for row, _ in requests]
    headers = [{"explain": "False", **({"url_path": path} if path else {})} for _, path in requests]
    return worker.made.handle_rows(worker.handler, rows, headers)


def test_openais_form(worker: Worker) -> None:
    ours = worker(FILES[1], *(asked(FILES[1], task="transcribe", return_timestamps=each) for each in (None, True)))
    bare, text, timed = ours[0], ours[1]["text"], ours[2]
    form = {"file": bytearray(FILES[1]), "model": b"whisper-1"}
    answers = posted(
        worker,
        (form, TRANSCRIPTIONS),
        ({**form, "response_format": b"text"}, TRANSCRIPTIONS),
        ({**form, "response_format": "verbose_json", "timestamp_granularities[]": "segment"}, TRANSCRIPTIONS),
        ({**form, "response_format": b"vtt", "language": b"de", "temperature": b"0"}, TRANSLATIONS),
        ({**form, "response_format": b"srt"}, TRANSCRIPTIONS),
        ({"body": FILES[1]}, ""),
        ({**form, "stream": b"true"}, TRANSCRIPTIONS),
        ({**form, "timestamp_granularities[]": b"word"}, TRANSCRIPTIONS),
        ({**form, "language": b"xx"}, TRANSCRIPTIONS),
        ({"file": b"no recording"}, TRANSCRIPTIONS),
        ({"body": FILES[1]}, TRANSCRIPTIONS),
        ({"file": "a text"}, TRANSCRIPTIONS),
        (form, "v1/audio/speech"),
        ({**form, "prompt": b"\xff"}, TRANSCRIPTIONS),
        ({**form, "timestamp_granularities[]": b"segment"}, TRANSCRIPTIONS),
    )  # fmt: skip
    types = [worker.made.context.get_response_content_type(place) for place in range(5)]
    plain = "text/plain; charset=utf-8"
    assert types == ["application/json", plain, "application/json", "text/vtt; charset=utf-8", plain]
    assert answers[0] == {"text": text} and answers[1] == text + "\n" and answers[5] == bare
    verbose = answers[2]
    assert verbose["text"] == timed["text"] and verbose["duration"] == 3.1 and verbose["task"] == "transcribe"
    assert verbose["language"] in {"english", "german", "french"}
    assert all(0 <= each["start"] <= 3.1 and each["end"] <= 3.1 for each in verbose["segments"])
    assert "".join(each["text"] for each in verbose["segments"]) == verbose["text"]
    assert answers[3].startswith("WEBVTT\n\n00:00:0") and " --> " in answers[3]
    assert answers[4].startswith("1\n00:00:00,") and answers[4].count(" --> ") == len(verbose["segments"])
    refused = [answer["error"]["message"] for answer in answers[6:]]
    parts = ["stream", "timestamp_granularities", "'xx'", "not a recording", "send a form", "not text", "no endpoint",
             "not UTF-8", "no effect with response_format json"]  # fmt: skip
    assert [part for part, message in zip(parts, refused, strict=True) if part not in message] == []
    assert [worker.status(place) for place in range(6, 15)] == [400, 400, 400, 415, 400, 400, 404, 400, 400]
    assert answers[10]["error"]["param"] == "file"


def test_a_prompt_is_what_generate_takes(worker: Worker) -> None:
    handler = worker.handler
    (found,) = worker(asked(FILES[2], prompt="ada, babbage. lovelace"))
    model, tokenizer = handler.eager_model, handler.listener._tokenizer
    ids = torch.from_numpy(tokenizer.get_prompt_ids("ada, babbage. lovelace"))
    features, mask = handler.listener.extract(ARRAYS[2])
    # A prompt takes half of the model's 40 places at most.
    with torch.no_grad():
        wanted = model.generate(features, attention_mask=mask, prompt_ids=torch.cat([ids[:1], ids[-18:]]))
    assert found["text"] == tokenizer.decode(wanted[0], skip_special_tokens=True)
    (drawn,) = worker(asked(FILES[2], temperature=0.7))
    assert worker.status() == 200 and drawn["text"]


def test_several_recordings_of_one_request(worker: Worker) -> None:
    inputs = [base64.b64encode(file).decode() for file in FILES[:2]]
    (found,) = worker({"inputs": [*inputs, "!"], "parameters": {"return_timestamps": True}})
    assert worker.status() == 207 and found[2]["code"] == 400
    assert found[:2] == [worker.one(asked(file, return_timestamps=True)) for file in FILES[:2]]


@pytest.mark.slow
def test_a_warm_start_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENVINO_TORCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENVINO_TORCH_MODEL_CACHING", "1")
    folder = whisper(tmp_path / "saved")
    cold = started(tmp_path / "cold", folder)
    warm = started(tmp_path / "warm", folder)
    found = [each.report()["cache"] for each in (cold, warm)]
    assert found[0]["compiles"] == 4 and (found[1]["traces"], found[1]["compiles"]) == (0, 0), found
    warm.ran_compiled()
    assert warm(*FILES) == cold(*FILES)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"return_timestamps": True}], ids=["one language", "always times"])
def test_batches_and_models_of_other_kinds(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = whisper(tmp_path / "saved", multilingual=bool(changes), **changes)
    worker = started(tmp_path, folder, batching={"buckets": [1, 2], "one_graph": True}, threads="auto")
    reference = transformers.pipeline("automatic-speech-recognition", model=str(folder), device="cpu")
    wanted = [reference(array.copy(), generate_kwargs={"num_beams": 1}) for array in ARRAYS]
    assert plain(worker(*FILES)) == plain(wanted)
    worker.ran_compiled()
    # One graph for both sizes of a batch.
    report = worker.report()
    assert report["summary"]["graphs"] == 4 and report["config"]["threads"]["torch_threads"] == 1


@pytest.mark.slow
def test_windows_of_thirty_seconds(tmp_path: Path) -> None:
    folder = whisper(tmp_path / "saved", window=30)
    worker = started(tmp_path, folder, audio={})
    assert worker.handler.allowed.seconds == 600
    reference = transformers.pipeline("automatic-speech-recognition", model=str(folder), device="cpu")
    for seconds in (33.0, 5.0):
        samples = np.round(recording(seconds, 3) * 32767).astype(np.int16)
        array = (samples / np.float32(32768)).astype(np.float32)
        found = worker.one(asked(encoded(samples), return_timestamps=True))
        assert plain(found) == plain(reference(array, return_timestamps=True, generate_kwargs={"num_beams": 1}))
    worker.ran_compiled()


@pytest.mark.slow
def test_no_times_no_proof_and_weights_in_16_bits(tmp_path: Path) -> None:
    folder = whisper(tmp_path / "saved", timed=False, half=True)
    made = started(tmp_path, folder, verify={"against": "off"})
    assert made.handler.allowed.seconds == 2 and made.report()["generate"]["passed"] is None
    reference = transformers.pipeline(
        "automatic-speech-recognition", model=str(folder), device="cpu", dtype=torch.float32
    )
    assert made.one(FILES[0]) == reference(ARRAYS[0].copy(), generate_kwargs={"num_beams": 1})
    refused = made.one(asked(FILES[0], return_timestamps=True))
    assert made.status() == 400 and "no_timestamps_token_id" in refused["message"]
    refused = made.one(FILES[1])
    assert made.status() == 413 and "the longest is 2 s (the model's window: it writes no times" in refused["message"]


def test_settings_and_models_that_are_not_served(tmp_path: Path) -> None:
    folder = whisper(tmp_path / "saved")
    for number, (section, message) in enumerate((
        ({"warmup": {"inputs": [{"shape": [4]}]}}, "warmup.inputs has no use for Whisper"),
        ({"audio": {"lengths": [1]}}, "audio.lengths has no use for Whisper"),
    )):  # fmt: skip
        with pytest.raises(ModelLoadError, match=message):
            started(tmp_path / str(number), folder, **section)
    # Another model that writes token by token.
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(ModelLoadError, match="AutoModelForSpeechSeq2Seq cannot load"):
        started(tmp_path / "t5", folder)


# --- forms --------------------------------------------------------------------------------------------------------


def test_subtitles() -> None:
    segments = (
        Segment(0.0, 1.5, " Ada --> lived.", (1,)),
        Segment(1.5, 1.5, " ", (2,)),
        Segment(3661.25, 3662.0, "In\nLondon", ()),
    )
    transcripts = Transcript("Ada lived. In London", None, segments, "german", 3662.0)
    made = {
        name: endpoints.body(transcripts, endpoints.AnswerForm(name, "translate", 0.2))[0] for name in ("srt", "vtt")
    }
    assert made["srt"] == (
        "1\n00:00:00,000 --> 00:00:01,500\nAda -> lived.\n\n2\n01:01:01,250 --> 01:01:02,000\nIn\nLondon\n\n"
    )
    assert made["vtt"].startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nAda --&gt; lived.\n\n01:01:01.250")
    verbose = endpoints.body(transcripts, endpoints.AnswerForm("verbose_json", "translate", 0.2))[0]
    assert verbose["language"] == "english" and [each["id"] for each in verbose["segments"]] == [0, 1]
    assert verbose["segments"][0]["temperature"] == 0.2 and verbose["segments"][0]["compression_ratio"] > 0


def test_parameters_of_the_generation_may_stand_apart() -> None:
    found = flattened(
        {"language": "de", "generation_parameters": {"num_beams": 2}, "generate_kwargs": {"task": "transcribe"}}
    )
    asked = parameters_of(SpeechParameters, found)
    assert (asked.language, asked.num_beams, asked.task) == ("de", 2, "transcribe")


def test_subtitles_hold_what_was_said() -> None:
    said = Segment(0.0, 1.5, "if x <b and c> d & --> e", (1,))
    transcript = Transcript("", None, (said,), "english", 2.0)
    vtt, kind = endpoints.body(transcript, endpoints.AnswerForm("vtt", "transcribe", 0.0))
    assert "if x &lt;b and c&gt; d &amp; --&gt; e" in vtt and kind == "text/vtt; charset=utf-8"
    srt, kind = endpoints.body(transcript, endpoints.AnswerForm("srt", "transcribe", 0.0))
    assert "if x <b and c> d & -> e" in srt and kind == "text/plain; charset=utf-8"
