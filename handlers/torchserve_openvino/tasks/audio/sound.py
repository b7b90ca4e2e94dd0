"""Recordings: from bytes to mono samples at the model's rate, with limits that are checked before anything is decoded.

soundfile decodes (libsndfile: WAV, FLAC, Ogg, AIFF, MP3 and others), soxr resamples.
"""

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import soundfile
import soxr

from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError, UnsupportedMediaTypeError
from torchserve_openvino.tasks.audio.containers import mpeg_length, ogg_problem, stated_size
from torchserve_openvino.tasks.payloads import from_base64

SECTION = "handler.openvino.audio"
# Rates that microphones and studios use lie far inside. soxr's filters grow with the ratio of the two rates.
_RATES = (1_000, 768_000)
# Samples that are decoded at a time, of all channels: a header's number of frames is never allocated.
_BLOCK = 1 << 20
# Of one recording, mixed to one channel, 4 bytes each: 20 minutes at 48 kHz, five at 192 kHz.
_MOST_SAMPLES = 60_000_000
# libsndfile's numbers of errors that mean another kind of file, not a damaged one: unrecognized, an unsupported
# encoding, and what looked like MP3 by its first bytes alone.
_UNKNOWN = frozenset({1, 4, 7})
# libsndfile's number of frames where the header states none.
_NO_COUNT = 1 << 62
# Samples of MP3 that are counted beyond the longest recording: some frames.
_MARGIN = 16_384
# libsndfile's names of the format whose number of frames it estimates.
_MPEG = frozenset({"MP3", "MPEG"})


@dataclass(frozen=True)
class RecordingLimits:
    """The largest recording.

    Attributes:
        seconds: Its length.
        bytes: Its size as sent.
        key: The configuration key that sets the length.
    """

    seconds: float
    bytes: int
    key: str = f"{SECTION}.max_seconds"


def samples_of(value: Any, rate: int, limits: RecordingLimits) -> np.ndarray:
    """Returns a recording's samples.

    Args:
        value: An audio file as bytes, or as base64 text (a data: URL as well).
        rate: Sampling rate of the result in Hz.
        limits: The largest recording.

    Returns:
        float32 ``[samples]``: all channels mixed to one, resampled.

    Raises:
        PayloadTooLargeError: It has more bytes or seconds than allowed.
        UnsupportedMediaTypeError: Not an audio file that libsndfile reads.
        InvalidInputError: It is empty, damaged, or holds values that are no numbers.
    """
    if isinstance(value, (bytes, bytearray)) and bytes(value[:5]) == b"data:":
        value = bytes(value).decode("latin-1")
    if isinstance(value, str):
        value = from_base64(value, what="recording", max_bytes=limits.bytes, key=f"{SECTION}.max_bytes")
    if not isinstance(value, (bytes, bytearray)):
        raise InvalidInputError(f"a recording must come as bytes or base64 text, not {type(value).__name__}")
    if not value:
        raise InvalidInputError("the recording is empty")
    if len(value) > limits.bytes:
        raise PayloadTooLargeError(
            f"the recording has {len(value)} bytes; the most is {limits.bytes} ({SECTION}.max_bytes)"
        )
    return _decoded(bytes(value), rate, limits)


def _decoded(data: bytes, rate: int, limits: RecordingLimits) -> np.ndarray:
    """Returns the samples of an audio file, mixed to one channel and resampled."""
    _check_whole(data, limits)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_header(file)
            length = _length(file, data, limits)
            return np.ascontiguousarray(_read(file, length, rate, limits), dtype=np.float32)
    except soundfile.LibsndfileError as error:
        if error.code in _UNKNOWN:
            raise UnsupportedMediaTypeError(
                f"the {len(data)} bytes are not a recording that libsndfile can read (WAV, FLAC, Ogg, ...)"
            ) from error
        raise InvalidInputError(
            f"the recording is damaged, or of a kind that libsndfile does not decode: {error.error_string}"
        ) from error


def _check_header(file: Any) -> None:
    if not _RATES[0] <= file.samplerate <= _RATES[1]:
        raise InvalidInputError(
            f"the recording's sampling rate is {file.samplerate} Hz; it must be {_RATES[0]} to {_RATES[1]} Hz"
        )
    if file.frames == 0:
        raise InvalidInputError("the recording is empty: it has no samples")
    if file.frames >= _NO_COUNT:
        # soundfile can't read on at the end of such a file.
        raise InvalidInputError("the recording's header does not state its length, as of a FLAC file from a pipe")


def _length(file: Any, data: bytes, limits: RecordingLimits) -> range:
    """Returns how many samples of one channel a file has to give: a range where decoders may differ.

    Raises:
        PayloadTooLargeError: They are more than allowed.
        InvalidInputError: libsndfile would leave some out.
    """
    rate, frames = file.samplerate, file.frames
    counted, slack = frames, 0
    if file.format in _MPEG:
        try:
            mpeg = mpeg_length(data, int(limits.seconds * rate) + _MARGIN)
        except ValueError as error:
            raise InvalidInputError(f"the recording is damaged: {error}") from error
        if mpeg is None:
            # Of a free bit rate, which `_read` takes as it comes.
            return range(1, _MOST_SAMPLES + 1)
        counted, slack = mpeg.samples, mpeg.slack
        if mpeg.stated is not None and mpeg.stated > counted + slack and counted <= limits.seconds * rate:
            raise InvalidInputError(
                f"the recording is cut off: its header states {mpeg.stated / rate:.1f} s, {counted / rate:.1f} s follow"
            )
    if counted - slack > limits.seconds * rate:
        raise _too_long(counted / rate, limits, "more than " if slack else "")
    if counted > _MOST_SAMPLES:
        raise _too_many(rate)
    if frames < counted - slack:
        raise InvalidInputError(
            f"the recording has {counted / rate:.1f} s, and its header {frames / rate:.1f} s, as where files were "
            "joined, or the bit rate varies without a table; write it anew, as `ffmpeg -i in.mp3 -c copy out.mp3` does"
        )
    return range(counted - slack, counted + slack + 1)


def _read(file: Any, length: range, rate: int, limits: RecordingLimits) -> np.ndarray:
    step, read = max(1, _BLOCK // file.channels), 0
    # Block by block: of a recording at a high rate, all samples would be many times those that the model hears.
    stream = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32") if file.samplerate != rate else None
    blocks: list[np.ndarray] = []
    while len(block := file.read(step, dtype="float32", always_2d=True)):
        mono = block[:, 0] if file.channels == 1 else block.mean(axis=1)
        _check_finite(mono)
        blocks.append(stream.resample_chunk(mono) if stream is not None else mono)
        read += len(block)
        if read > limits.seconds * file.samplerate:
            raise _too_long(read / file.samplerate, limits, "more than ")
    if read not in length or not read:
        raise InvalidInputError(
            f"the recording is damaged or cut off: {read} of its {length.stop - 1} samples can be read"
        )
    if stream is not None:
        blocks.append(stream.resample_chunk(np.empty(0, np.float32), last=True))
    samples = np.concatenate(blocks)
    # The filter can overflow where samples are close to the largest float.
    _check_finite(samples)
    return samples


def _check_whole(data: bytes, limits: RecordingLimits) -> None:
    """Compares what a file's header states with what follows.

    Raises:
        PayloadTooLargeError: The header states a longer recording than allowed.
        InvalidInputError: The samples end before the header's number of bytes, or there are several recordings.
    """
    try:
        size = stated_size(data)
    except ValueError as error:
        raise InvalidInputError(f"the recording is damaged: this {error} file has no samples") from error
    if size is not None:
        if size.per_second and size.bytes > limits.seconds * size.per_second:
            raise _too_long(size.bytes / size.per_second, limits)
        if size.bytes > size.following:
            raise InvalidInputError(
                f"the recording is cut off: its header states {size.bytes} bytes of samples, {size.following} follow"
            )
    if problem := ogg_problem(data):
        raise InvalidInputError(f"the recording can't be taken whole: {problem}")


def _check_finite(samples: np.ndarray) -> None:
    if not np.isfinite(samples).all():
        raise InvalidInputError("the recording holds samples that are NaN or infinite")


def _too_many(rate: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the recording has more than {_MOST_SAMPLES} samples at {rate} Hz; send it at a lower rate, or in parts"
    )


def _too_long(seconds: float, limits: RecordingLimits, more: str = "") -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the recording has {more}{seconds:.1f} s; the longest is {limits.seconds:g} s ({limits.key})"
    )
