"""Whisper in pieces, not compiled here: the same scores and texts as the model itself, in any rows and any company."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hub_audio_models import recording
from speech_models import WINDOW, whisper
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.errors import GenerationError, InvalidInputError, ModelLoadError, NonFiniteOutputError
from torchserve_openvino.generation.speech.recordings import Passes, TranscriptionSettings
from torchserve_openvino.generation.speech.speech_model import SpeechModel
from torchserve_openvino.generation.speech.speech_proof import made_up, prove
from torchserve_openvino.generation.speech.stand_in import CompiledWhisper, stand_in
from torchserve_openvino.generation.speech.whisper_decoder import WIDTH, WhisperDecoder
from torchserve_openvino.generation.text.expected import Nearness
from torchserve_openvino.serving.loading import hub
from torchserve_openvino.tasks.catalog import TASKS

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = [recording(seconds, seed) for seed, seconds in enumerate((0.5, 1.9, 1.2))]
LONG = [recording(seconds, seed) for seed, seconds in enumerate((3.1, 4.4, 2.1))]


def opened(folder: Path) -> SpeechModel:
    model: Any = hub.load_model(folder, TASKS["speech_recognizer"].encoder_loader)
    return SpeechModel(model, hub.load_feature_extractor(folder), hub.load_tokenizer(folder, fast=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def eager(folder: Path) -> SpeechModel:
    return opened(folder)


@pytest.fixture(scope="module")
def pieces(eager: SpeechModel) -> WhisperDecoder:
    return WhisperDecoder(eager.model, (1, 2))


@pytest.fixture(scope="module")
def in_pieces(eager: SpeechModel, pieces: WhisperDecoder) -> SpeechModel:
    return eager.like(stand_in(eager.model, pieces), pieces.forget)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_scores_are_the_models(eager: SpeechModel, pieces: WhisperDecoder, rows: int) -> None:
    model, generator = eager.model, torch.Generator().manual_seed(rows)
    features = torch.cat([eager.extract(samples)[0] for samples in SHORT[:rows]])
    ids = torch.randint(0, model.config.vocab_size, (rows, WIDTH + 5), generator=generator)
    # Hidden tokens on the left, as texts of different lengths are continued.
    shown = torch.arange(ids.shape[1]) >= torch.arange(rows)[:, None]
    positions = (shown.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = model(
            features, decoder_input_ids=ids, decoder_attention_mask=shown, decoder_position_ids=positions
        ).logits
        memory = pieces.memory(pieces.encode(features))
        until = WIDTH + 2
        found = [pieces.decode(ids[:, :until], memory, positions[:, :until], shown[:, :until])]
        for place in range(until, ids.shape[1]):
            some = slice(place, place + 1)
            found.append(pieces.decode(ids[:, some], memory, positions[:, some], shown[:, : place + 1]))
    torch.testing.assert_close(torch.cat(found, 1)[shown], wanted[shown], rtol=1e-4, atol=1e-4)
    assert memory.get_seq_length() == ids.shape[1]


def test_a_text_that_is_too_long_and_scores_that_are_no_numbers(eager: SpeechModel, pieces: WhisperDecoder) -> None:
    features = eager.extract(SHORT[0])[0]
    with torch.no_grad():
        memory = pieces.memory(pieces.encode(features))
        with pytest.raises(ValueError, match="41 tokens do not fit; this model has 40 positions"):
            pieces.decode(torch.zeros(1, 41, dtype=torch.int64), memory)
        with pytest.raises(NonFiniteOutputError, match="not numbers"):
            pieces.decode(torch.tensor([[1]]), pieces.memory(pieces.encode(features * float("nan"))))
    pieces.forget()


WANTED = {
    "plain": TranscriptionSettings(),
    "times": TranscriptionSettings(timestamps=True),
    "translated": TranscriptionSettings(language="<|de|>", task="translate", max_new_tokens=17),
    "beams": TranscriptionSettings(num_beams=3, timestamps=True),
    "prompt": TranscriptionSettings(prompt=(37, 9, 0, 8, *range(5, 18))),
}
QUICK = {("short", "plain"), ("long", "times"), ("short", "prompt")}


@pytest.mark.parametrize(
    ("sounds", "wanted"),
    [
        pytest.param(sounds, wanted, id=f"{length}-{name}", marks=[] if (length, name) in QUICK else pytest.mark.slow)
        for length, sounds in (("short", SHORT), ("long", LONG))
        for name, wanted in WANTED.items()
    ],
)
def test_recordings_in_company_are_heard_as_alone_by_the_model(eager, in_pieces, sounds, wanted) -> None:
    ready = [eager.sound(samples) for samples in sounds]
    alone = [eager.transcribe([sound], wanted)[0] for sound in ready]
    assert any(transcripts.text for transcripts in alone)
    assert in_pieces.transcribe(ready, wanted) == alone
    assert in_pieces.joins(wanted, short=True) == (wanted.num_beams is None)


@pytest.mark.slow
def test_what_a_text_goes_on_from(tmp_path: Path) -> None:
    eager = opened(whisper(tmp_path, condition_on_prev_tokens=True))
    plain, timed = TranscriptionSettings(), TranscriptionSettings(timestamps=True)
    assert not eager.joins(plain, short=False) and eager.joins(plain, short=True)
    # Several passes, each padded to the others' texts.
    assert not eager.joins(timed, short=True)
    # Before the text of a later pass, up to half of the 40 places are taken.
    eager.check(TranscriptionSettings(max_new_tokens=16), eager.sound(LONG[0]))
    with pytest.raises(InvalidInputError, match="of which 24 are its beginning: at most 16"):
        eager.check(TranscriptionSettings(max_new_tokens=17), eager.sound(LONG[0]))
    in_pieces = eager.like(stand_in(eager.model, WhisperDecoder(eager.model, (2,))), lambda: None)
    for samples in LONG:
        sound = eager.sound(samples)
        wanted = TranscriptionSettings(timestamps=True, max_new_tokens=12)
        assert in_pieces.transcribe([sound], wanted) == eager.transcribe([sound], wanted)


@pytest.mark.parametrize("changes", [{"return_timestamps": False}, {"max_length": None}])
def test_what_the_models_own_settings_leave_open_or_forbid(tmp_path: Path, changes: dict[str, Any]) -> None:
    # Times are needed to go on by; without a length, `generate` stops after 20 tokens.
    heard = opened(whisper(tmp_path, **changes))
    wanted = opened(whisper(tmp_path / "plain"))
    for samples, settings in (
        (LONG[0], TranscriptionSettings()),
        (SHORT[1], TranscriptionSettings()),
        (SHORT[2], WANTED["prompt"]),
    ):
        sound = heard.sound(samples)
        heard.check(settings, sound)
        assert heard.transcribe([sound], settings) == wanted.transcribe([sound], settings)


def test_a_prompt_takes_its_room_of_the_models_own_length(eager: SpeechModel, tmp_path: Path) -> None:
    heard, sound = opened(whisper(tmp_path, max_new_tokens=35)), eager.sound(SHORT[2])
    (text,), (wanted,) = (each.transcribe([sound], WANTED["prompt"]) for each in (heard, eager))
    assert wanted.text.startswith(text.text)


@pytest.mark.parametrize("key", ["logprob_threshold", "no_speech_threshold"])
def test_settings_that_need_scores_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelLoadError, match=f"generation_config.json sets {key}"):
        opened(whisper(tmp_path, **{key: -1.0}))


def test_groups(eager: SpeechModel) -> None:
    sounds = [eager.sound(samples) for samples in (*SHORT, *LONG)]
    german, drawn = TranscriptionSettings(language="<|de|>"), TranscriptionSettings(temperature=0.5)
    wanted = [
        TranscriptionSettings(),
        german,
        TranscriptionSettings(),
        TranscriptionSettings(),
        drawn,
        TranscriptionSettings(),
    ]
    assert eager.groups(list(zip(sounds, wanted, strict=True)), 4) == [[0, 2], [1], [3, 5], [4]]
    assert eager.groups([(sounds[0], TranscriptionSettings())] * 5, 2) == [[0, 1], [2, 3], [4]]


def test_languages_tasks_and_prompts(eager: SpeechModel, tmp_path: Path) -> None:
    assert [eager.language(name) for name in ("de", "German", "<|de|>")] == ["<|de|>"] * 3
    with pytest.raises(InvalidInputError, match=r"language is 'germna'; this model knows de, en, fr.*mean 'german'"):
        eager.language("germna")
    with pytest.raises(InvalidInputError, match="language is 'spanish'"):
        eager.language("spanish")
    assert eager.prompt("ada") == (37, 0, 1, 4, 1) and len(eager.prompt("ada, ada, " * 10)) == 19
    with pytest.raises(InvalidInputError, match=r"prompt: .*<\|en\|>"):
        eager.prompt("<|en|>")
    one = opened(whisper(tmp_path, multilingual=False, timed=False))
    assert (
        one.task("transcribe") is None
        and one.transcribe([one.sound(SHORT[0])], TranscriptionSettings())[0].language == "english"
    )
    with pytest.raises(InvalidInputError, match="task is 'translate'; this model has transcribe only"):
        one.task("translate")
    with pytest.raises(InvalidInputError, match="one language only"):
        one.language("en")
    with pytest.raises(InvalidInputError, match="return_timestamps needs a model that writes times"):
        one.check(TranscriptionSettings(timestamps=True), one.sound(SHORT[0]))
    with pytest.raises(InvalidInputError, match=f"more than {WINDOW} s needs a model that writes times"):
        one.check(TranscriptionSettings(), one.sound(LONG[0]))
    with pytest.raises(InvalidInputError, match="writes 40 tokens for each window of 2 s.*at most 36"):
        one.check(TranscriptionSettings(max_new_tokens=37), one.sound(SHORT[0]))


def test_a_recording_that_takes_too_many_passes() -> None:
    passes = Passes(1.0)
    for _ in range(22):
        passes(torch.tensor([[7, 100]]))
    with pytest.raises(GenerationError, match="after 22 passes it is at frame 7 of 100"):
        passes(torch.tensor([[7, 100]]))


def test_files_that_do_not_fit_together(eager: SpeechModel) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=3)
    with pytest.raises(ModelLoadError, match="makes 300 frames of 20 mel bins; the model takes 200 of 20"):
        SpeechModel(eager.model, extractor, None)


def test_the_proof_finds_a_wrong_decoder(eager: SpeechModel, in_pieces: SpeechModel, tmp_path: Path) -> None:
    recorded = made_up(eager.rate, eager.window, eager.extract, timed=True, together=True)
    assert [tuple(each.features.shape[::2]) for each in recorded] == [(1, 200)] * 3 + [(1, 260), (3, 200)]
    proof = prove(eager.model, in_pieces.model, recorded, 9, ["f32"], VerifySection())
    assert proof.passed and proof.prompts == 7 and proof.tokens_equal == proof.tokens_compared > 60
    other = opened(whisper(tmp_path))
    with torch.no_grad():
        other.model.model.decoder.layers[1].fc2.weight *= 1.2
    wrong = stand_in(eager.model, WhisperDecoder(other.model, (1, 2)))
    proof = prove(eager.model, wrong, recorded, 9, ["f32"], VerifySection())
    assert not proof.passed and proof.first_difference is not None and len(proof.problems) >= 2
    assert isinstance(proof.logits, Nearness) and proof.logits.least_cosine < 0.9999
    assert isinstance(wrong, CompiledWhisper) and not isinstance(eager.model, CompiledWhisper)


def test_a_stand_in_refuses_what_it_does_not_compute(in_pieces: SpeechModel) -> None:
    features = torch.from_numpy(np.zeros((1, 20, 200), np.float32))
    with pytest.raises(ValueError, match="returns logits only"):
        in_pieces.model(features, decoder_input_ids=torch.tensor([[1]]), output_attentions=True)
    with pytest.raises(ValueError, match="neither"):
        in_pieces.model(decoder_input_ids=torch.tensor([[1]]))
