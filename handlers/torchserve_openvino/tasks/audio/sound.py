"""Recordings: from bytes to mono samples at the model's rate, with limits that are checked before anything is decoded.

soundfile decodes (libsndfile: WAV, FLAC, Ogg, AIFF, MP3 and others), soxr resamples.
"""

import io
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import soundfile
import soxr

from torchserve_openvino.errors import InvalidInputError, PayloadTooLargeError, UnsupportedMediaTypeError
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
# Programs that write a WAV file into a pipe don't know its size, and state about the largest one.
_STREAMED = 0x7FFF0000
# libsndfile's number of frames where the header states none.
_NO_COUNT = 1 << 62
# Formats whose number of frames is an estimate.
_ESTIMATED = frozenset({"MP3", "MPEG"})


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
    samples, sampling_rate = _decoded(bytes(value), limits)
    _check_finite(samples)
    if sampling_rate != rate:
        samples = soxr.resample(samples, sampling_rate, rate)
        # The filter can overflow where samples are close to the largest float.
        _check_finite(samples)
    return np.ascontiguousarray(samples, dtype=np.float32)


def _decoded(data: bytes, limits: RecordingLimits) -> tuple[np.ndarray, int]:
    """Returns the samples of an audio file, mixed to one channel, and its sampling rate."""
    _check_wave(data, limits)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            return _read(file, limits), file.samplerate
    except soundfile.LibsndfileError as error:
        if error.code in _UNKNOWN:
            raise UnsupportedMediaTypeError(
                f"the {len(data)} bytes are not a recording that libsndfile can read (WAV, FLAC, Ogg, ...)"
            ) from error
        raise InvalidInputError(
            f"the recording is damaged, or of a kind that libsndfile does not decode: {error.error_string}"
        ) from error


def _read(file: Any, limits: RecordingLimits) -> np.ndarray:
    rate, frames = file.samplerate, file.frames
    if not _RATES[0] <= rate <= _RATES[1]:
        raise InvalidInputError(f"the recording's sampling rate is {rate} Hz; it must be {_RATES[0]} to {_RATES[1]} Hz")
    if frames == 0:
        raise InvalidInputError("the recording is empty: it has no samples")
    if frames >= _NO_COUNT:
        # soundfile can't read on at the end of such a file.
        raise InvalidInputError("the recording's header does not state its length, as of a FLAC file from a pipe")
    if frames > limits.seconds * rate:
        raise _too_long(frames / rate, limits)
    if frames > _MOST_SAMPLES:
        raise _too_many(rate)
    step = max(1, _BLOCK // file.channels)
    blocks: list[np.ndarray] = []
    read = 0
    while len(block := file.read(step, dtype="float32", always_2d=True)):
        blocks.append(block[:, 0] if file.channels == 1 else block.mean(axis=1))
        read += len(block)
        if read > limits.seconds * rate:
            raise _too_long(read / rate, limits, "more than ")
        if read > _MOST_SAMPLES:
            # The number of frames in an MP3 is an estimate.
            raise _too_many(rate)
    if not read or (read < frames and file.format not in _ESTIMATED):
        raise InvalidInputError(f"the recording is damaged or cut off: {read} of its {frames} samples can be read")
    return np.concatenate(blocks)


def _check_wave(data: bytes, limits: RecordingLimits) -> None:
    """Compares what a WAV file's header states with what follows, because libsndfile takes what there is.

    Raises:
        PayloadTooLargeError: The header states a longer recording than allowed.
        InvalidInputError: The samples end before the header's number of bytes.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    offset, per_second = 12, 0
    while offset + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, offset)
        start = offset + 8
        if name == b"fmt " and start + 12 <= len(data):
            (per_second,) = struct.unpack_from("<I", data, start + 8)
        if name == b"data":
            if size < _STREAMED and per_second and size > limits.seconds * per_second:
                raise _too_long(size / per_second, limits)
            if size < _STREAMED and size > len(data) - start:
                raise InvalidInputError(
                    f"the recording is cut off: its header states {size} bytes of samples, {len(data) - start} follow"
                )
            return
        offset = start + size + size % 2
    raise InvalidInputError("the recording is damaged: this WAV file has no samples")


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
