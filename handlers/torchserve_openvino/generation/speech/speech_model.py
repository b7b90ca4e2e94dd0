"""Transcribes recordings with a Whisper model: samples to spectrograms, through ``generate``, to text and times."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchserve_openvino.config.spelling import listed, nearest
from torchserve_openvino.errors import InvalidInputError, ModelLoadError
from torchserve_openvino.generation.speech.recordings import Passes, Segment, Sound, Transcript, TranscriptionSettings

# Tokens at the beginning of a text: start, language, task, no timestamps.
_BEGINNING = 4
# Settings by which `generate` drops or repeats a text for its scores, which a compiled model does not return.
_NEED_SCORES = ("logprob_threshold", "no_speech_threshold")


class SpeechModel:
    """A Whisper model with its feature extractor and its tokenizer.

    Args:
        model: The model, or its stand-in.
        extractor: Its feature extractor.
        tokenizer: Its tokenizer.
        forget: Called after each transcription, to free what the model kept for it.

    Attributes:
        rate: The model's sampling rate in Hz.
        window: How much it hears at once, in seconds.

    Raises:
        ModelLoadError: They do not fit together.
    """

    def __init__(self, model: Any, extractor: Any, tokenizer: Any, forget: Callable[[], object] | None = None) -> None:
        self.model, self._extractor, self._tokenizer = model, extractor, tokenizer
        self._forget = forget
        self._settings = model.generation_config
        self.rate = int(extractor.sampling_rate)
        config = model.config
        frames, bins = 2 * int(config.max_source_positions), int(config.num_mel_bins)
        extracted = int(extractor.nb_max_frames), int(extractor.feature_size)
        if extracted != (frames, bins):
            raise ModelLoadError(
                f"preprocessor_config.json makes {extracted[0]} frames of {extracted[1]} mel bins; the model takes "
                f"{frames} of {bins}."
            )
        self.window = float(extractor.chunk_length)
        for key in _NEED_SCORES:
            if getattr(self._settings, key, None) is not None:
                raise ModelLoadError(
                    f"generation_config.json sets {key}, for which each text's scores would have to be kept; that is "
                    "not served. Remove it there."
                )

    def like(self, model: Any, forget: Callable[[], object]) -> "SpeechModel":
        """Returns the same with a stand-in for the model."""
        return SpeechModel(model, self._extractor, self._tokenizer, forget)

    # --- what the model can do --------------------------------------------------------------------------------

    @property
    def timed(self) -> bool:
        """Whether it writes times, which it also needs for recordings longer than its window."""
        return hasattr(self._settings, "no_timestamps_token_id")

    @property
    def timed_always(self) -> bool:
        """Whether its own settings ask for times."""
        return bool(getattr(self._settings, "return_timestamps", False))

    @property
    def most_tokens(self) -> int:
        """Most tokens that it writes for one window."""
        return int(self.model.config.max_target_positions) - _BEGINNING

    @property
    def languages(self) -> dict[str, int]:
        """Its languages' tokens, such as ``<|en|>``; empty for a model of one language."""
        if not getattr(self._settings, "is_multilingual", True):
            return {}
        return dict(getattr(self._settings, "lang_to_id", None) or {})

    @property
    def tasks(self) -> tuple[str, ...]:
        """Its tasks; empty for a model that only transcribes."""
        if not getattr(self._settings, "is_multilingual", True):
            return ()
        return tuple(getattr(self._settings, "task_to_id", None) or ())

    def joins(self, settings: TranscriptionSettings, *, short: bool) -> bool:
        """Whether a recording may be transcribed with others, and the text is the one that it has alone."""
        beams = settings.num_beams or getattr(self._settings, "num_beams", None) or 1
        # Where a pass goes on from the text of the one before, texts are padded to each other's. Short recordings take
        # several passes where they are cut into segments.
        alone = self._conditioned and (not short or settings.timestamps)
        return beams == 1 and settings.temperature == 0 and not alone

    @property
    def _conditioned(self) -> bool:
        """Whether each pass over a recording goes on from the text of the one before."""
        return bool(getattr(self._settings, "condition_on_prev_tokens", None))

    def _beginning(self, settings: TranscriptionSettings, *, short: bool) -> int:
        """Returns the most tokens that stand before those that a pass writes."""
        before = len(settings.prompt)
        if self._conditioned and (not short or settings.timestamps):
            before = max(before, int(self.model.config.max_target_positions) // 2)
        return _BEGINNING + before

    def _lengths(self, settings: TranscriptionSettings, *, short: bool) -> dict[str, int]:
        """Returns how long the text of one pass may become, as arguments of ``generate``.

        Where neither the request nor the model says, it is as long as the model can write; ``generate`` itself would
        stop after 20 tokens.
        """
        if settings.max_new_tokens is not None:
            return {"max_new_tokens": settings.max_new_tokens}
        most = int(self.model.config.max_target_positions)
        own = self._settings.max_new_tokens
        if own is not None:
            return {"max_new_tokens": min(int(own), most - self._beginning(settings, short=short))}
        return {} if self._settings.max_length is not None else {"max_length": most}

    def language(self, name: str) -> str:
        """Returns a language's token.

        Args:
            name: As ``en``, ``English`` or ``<|en|>``.

        Raises:
            InvalidInputError: The model does not know it.
        """
        if not self.languages:
            raise InvalidInputError("language: this model knows one language only; leave it out")
        codes = language_codes()
        plain = name.strip().lower()
        token = plain if plain.startswith("<|") else f"<|{codes.get(plain, plain)}|>"
        if token in self.languages:
            return token
        known = sorted(language[2:-2] for language in self.languages)
        hint = nearest(plain, [*known, *codes])
        raise InvalidInputError(
            f"language is {name!r}; this model knows {listed(known)}.{f' Did you mean {hint!r}?' if hint else ''}"
        )

    def task(self, name: str) -> str | None:
        """Returns a task as ``generate`` takes it.

        Raises:
            InvalidInputError: The model does not have it.
        """
        if name in self.tasks:
            return name
        if name == "transcribe" and not self.tasks:
            return None
        raise InvalidInputError(f"task is {name!r}; this model has {listed(self.tasks or ('transcribe',))} only")

    def prompt(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text that comes before; of a long one, as many of the last as the model reads.

        Raises:
            InvalidInputError: It holds a special token.
        """
        try:
            first, *rest = prompt_ids(self._tokenizer, text)
        except ValueError as error:
            raise InvalidInputError(f"prompt: {error}") from error
        most = int(self.model.config.max_target_positions) // 2 - 2
        return (first, *rest[-most:])

    def check(self, settings: TranscriptionSettings, sound: Sound) -> None:
        """Checks that a recording can be transcribed so.

        Raises:
            InvalidInputError: It can't; the message says why.
        """
        if not self.timed and (settings.timestamps or not self._short(sound)):
            cause = "return_timestamps" if settings.timestamps else f"a recording of more than {self.window:g} s"
            raise InvalidInputError(
                f"{cause} needs a model that writes times; generation_config.json of this one has no "
                "no_timestamps_token_id"
            )
        most = int(self.model.config.max_target_positions)
        begin = self._beginning(settings, short=self._short(sound))
        if begin + (settings.max_new_tokens or 1) > most:
            raise InvalidInputError(
                f"max_new_tokens is {settings.max_new_tokens}; this model writes {most} tokens for each window of "
                f"{self.window:g} s, of which {begin} are its beginning: at most {most - begin}"
            )

    # --- recordings -------------------------------------------------------------------------------------------

    def extract(self, samples: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns the spectrogram and its mask, as transformers' pipeline makes them.

        Args:
            samples: float32 ``[samples]`` at the model's rate.
        """
        long = len(samples) > self._extractor.n_samples
        how = {"truncation": False, "padding": "longest"} if long else {}
        features = self._extractor(
            samples, sampling_rate=self.rate, return_tensors="pt", return_attention_mask=True, **how
        )  # fmt: skip
        return features["input_features"], features["attention_mask"].to(torch.int64)

    def sound(self, samples: np.ndarray) -> Sound:
        """Makes a recording ready."""
        return Sound(*self.extract(samples), len(samples) / self.rate)

    def groups(self, sounds: Sequence[tuple[Sound, TranscriptionSettings]], most: int) -> list[list[int]]:
        """Returns which recordings are transcribed together, by their places.

        Args:
            sounds: Recordings, and how each is transcribed.
            most: Most recordings of one group.
        """
        groups: dict[Any, list[int]] = {}
        for index, (sound, settings) in enumerate(sounds):
            short = self._short(sound)
            groups.setdefault((settings, short) if self.joins(settings, short=short) else index, []).append(index)
        return [group[start : start + most] for group in groups.values() for start in range(0, len(group), most)]

    def transcribe(self, sounds: Sequence[Sound], settings: TranscriptionSettings) -> list[Transcript]:
        """Transcribes recordings together: all within a window, or all longer than one.

        Raises:
            GenerationError: The model goes over a recording again and again.
        """
        frames = max(sound.features.shape[-1] for sound in sounds)
        # Each is cut at its own end before it is encoded.
        features, mask = (
            torch.cat([nn.functional.pad(tensor, (0, frames - tensor.shape[-1])) for tensor in column])
            for column in zip(*((sound.features, sound.mask) for sound in sounds), strict=True)
        )
        short = self._short(sounds[0])
        passes = Passes(max(sound.seconds for sound in sounds))
        # Not in inference mode, whose tensors the compiled model would copy.
        try:
            with torch.no_grad():
                generated = self.model.generate(
                    input_features=features,
                    attention_mask=mask,
                    return_segments=True,
                    monitor_progress=passes,
                    # Those longer than a window need times to go on by, whatever the model's own settings say.
                    return_timestamps=True if settings.timestamps or not short else None,
                    **self._lengths(settings, short=short),
                    **settings.arguments(),
                )
        finally:
            if self._forget is not None:
                self._forget()
        return [self._heard(sound, row, settings) for sound, row in zip(sounds, generated["segments"], strict=True)]

    def _short(self, sound: Sound) -> bool:
        return sound.features.shape[-1] <= int(self._extractor.nb_max_frames)

    def _heard(
        self, sound: Sound, segments: Sequence[Mapping[str, Any]], settings: TranscriptionSettings
    ) -> Transcript:
        tokens = [token for segment in segments for token in segment["tokens"].tolist()]
        precision = self.window / int(self.model.config.max_source_positions)
        text, chunks = pipeline_text(self._tokenizer, tokens, settings.timestamps, precision)
        return Transcript(
            text, chunks, tuple(self._segment(segment, sound.seconds) for segment in segments),
            self._language(segments, settings), sound.seconds,
        )  # fmt: skip

    def _segment(self, segment: Mapping[str, Any], seconds: float) -> Segment:
        first = self._settings.no_timestamps_token_id if self.timed else self.model.config.vocab_size
        tokens = tuple(token for token in segment["tokens"].tolist() if token < first)
        # A segment without times of its own ends with its window.
        start, end = (min(float(segment[name]), seconds) for name in ("start", "end"))
        return Segment(round(start, 3), round(end, 3), self._tokenizer.decode(tokens, skip_special_tokens=True), tokens)

    def _language(self, segments: Sequence[Mapping[str, Any]], settings: TranscriptionSettings) -> str:
        names = language_names()
        if settings.language is not None:
            return names.get(settings.language[2:-2], "")
        if not self.languages:
            return "english"
        written = segments[0]["result"].tolist() if segments else []
        code = next((self._by_token[token] for token in written if token in self._by_token), "")
        return names.get(code, "")

    @cached_property
    def _by_token(self) -> dict[int, str]:
        """Codes of languages by their tokens."""
        return {token: name[2:-2] for name, token in self.languages.items()}


# --- what this package uses of transformers' Whisper that is not public; tests/contract/test_whisper.py pins it


def pipeline_text(
    tokenizer: Any, tokens: Sequence[int], timestamps: bool, precision: float
) -> tuple[str, list[dict[str, Any]] | None]:
    """Returns text and chunks as transformers' pipeline for speech recognition does.

    Args:
        tokenizer: A Whisper tokenizer.
        tokens: What the model wrote, with its tokens for times.
        timestamps: Whether to return chunks.
        precision: Seconds between two tokens for times.
    """
    outputs = [{"tokens": np.array([tokens], dtype=np.int64)}]
    text, optional = tokenizer._decode_asr(
        outputs, return_timestamps=timestamps or None, return_language=None, time_precision=precision
    )
    chunks = optional.get("chunks")
    if chunks is None:
        return text, None
    return text, [{**chunk, "timestamp": list(chunk["timestamp"])} for chunk in chunks]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens of a prompt, with the token that begins prompts.

    Raises:
        ValueError: It holds a special token.
    """
    return [int(token) for token in tokenizer.get_prompt_ids(text)]


def language_names() -> dict[str, str]:
    """Returns English names of languages by their codes."""
    # Imported here: it takes seconds, which only workers of models of transformers need.
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return dict(LANGUAGES)


def language_codes() -> dict[str, str]:
    """Returns codes of languages by their English names, of which some languages have several."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return dict(TO_LANGUAGE_CODE)
