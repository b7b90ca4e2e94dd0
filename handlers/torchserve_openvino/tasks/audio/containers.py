"""What audio files state about their length, against what is in them.

libsndfile takes what there is of a file that was cut off, and stops where the number of samples ends that it derived
from the first bytes; for MP3 without a table of contents that is an estimate.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Programs that write a file into a pipe don't know its size, and state 0 or about the largest one.
_STREAMED = 0x7FFF0000
_WAVE64 = b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\x00\x00"
# Bit rates in kbit/s by MPEG version (2 includes 2.5) and layer: ISO 11172-3, 2.4.2.3 and ISO 13818-3, 2.4.2.3.
_BIT_RATES = {
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}  # fmt: skip
_SAMPLING_RATES = (44_100, 48_000, 32_000)
# By the two bits of the version: 2.5, reserved, 2, 1, and what they divide sampling rates by.
_VERSIONS = ((2, 4), (0, 0), (2, 2), (1, 1))
# Of a file of empty chunks, each 8 bytes long, there would be millions.
_MOST_CHUNKS = 10_000
# Bytes that may look like the beginning of a frame and are none, in one file: each costs time.
_MOST_FALSE_STARTS = 100_000


@dataclass(frozen=True)
class StatedSize:
    """How many bytes of samples a file states.

    Attributes:
        bytes: As stated.
        following: Those that the file has.
        per_second: How many make a second; 0 where the header does not say.
    """

    bytes: int
    following: int
    per_second: int = 0


@dataclass(frozen=True)
class MpegLength:
    """The length of an MP3 (or MP2) file, by its frames.

    Attributes:
        samples: Samples of one channel.
        stated: What its table of contents states; None if it has none.
        slack: By how much a decoder may differ from it: it leaves out what the encoder added at both ends.
    """

    samples: int
    stated: int | None
    slack: int


def stated_size(data: bytes) -> StatedSize | None:
    """Returns what a WAV, RF64, Wave64, AIFF or AU file states; None if it is none of them, or does not say.

    Raises:
        ValueError: It has no samples; the message says of which kind it is.
    """
    if data[:4] in (b"RIFF", b"RF64", b"BW64") and data[8:12] == b"WAVE":
        return _wave(data)
    if data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC"):
        return _aiff(data)
    if data[:16] == _WAVE64 and len(data) >= 24:
        # Sony Wave64 states the size of the whole file.
        (size,) = struct.unpack_from("<Q", data, 16)
        return StatedSize(size, len(data)) if size < 1 << 62 else None
    if data[:4] == b".snd" and len(data) >= 12:
        start, size = struct.unpack_from(">II", data, 4)
        return StatedSize(size, max(0, len(data) - start)) if 0 < size < _STREAMED else None
    return None


def _wave(data: bytes) -> StatedSize | None:
    per_second, long = 0, 0
    for name, size, start in _chunks(data, "<4sI"):
        if name == b"fmt " and start + 12 <= len(data):
            (per_second,) = struct.unpack_from("<I", data, start + 8)
        if name == b"ds64" and start + 16 <= len(data):
            (long,) = struct.unpack_from("<Q", data, start + 8)
        if name == b"data":
            # Of RF64, the size in this place is the largest number.
            stated = long if size >= _STREAMED else size
            if size >= _STREAMED and not 0 < long < 1 << 63:
                return None
            return StatedSize(stated, len(data) - start, per_second)
    raise ValueError("WAV")


def _aiff(data: bytes) -> StatedSize | None:
    for name, size, start in _chunks(data, ">4sI"):
        if name == b"SSND":
            return StatedSize(size, len(data) - start) if 0 < size < _STREAMED else None
    raise ValueError("AIFF")


def _chunks(data: bytes, header: str) -> Iterator[tuple[bytes, int, int]]:
    """Yields name, stated size and start of each chunk, up to the most that are looked through."""
    offset = 12
    for _ in range(_MOST_CHUNKS):
        if offset + 8 > len(data):
            return
        name, size = struct.unpack_from(header, data, offset)
        yield name, size, offset + 8
        offset += 8 + size + size % 2


def ogg_problem(data: bytes) -> str | None:
    """Returns why an Ogg file is not one whole recording (RFC 3533, 6); None if it is, or no Ogg file."""
    offset, begun = 0, False
    while data[offset : offset + 4] == b"OggS":
        if offset + 27 > len(data):
            return "it is cut off in a page"
        flags, segments = data[offset + 5], data[offset + 26]
        table = data[offset + 27 : offset + 27 + segments]
        end = offset + 27 + segments + sum(table)
        if len(table) < segments or end > len(data):
            return "it is cut off in a page"
        # All streams of one recording begin before the first goes on.
        if flags & 2 and begun:
            return "it holds several recordings, one after the other"
        begun = begun or not flags & 2
        offset = end
    return None


def mpeg_length(data: bytes, most: int) -> MpegLength | None:
    """Returns the length of an MP3 or MP2 file, counted up to a bit more than ``most`` samples.

    Returns:
        None where no frame says how long it is (a free bit rate).

    Raises:
        ValueError: Too much of it is no frame.
    """
    samples, stated, false_starts, in_step, offset, longest = 0, None, 0, False, 0, 0
    while 0 <= offset <= len(data) - 4 and samples <= most:
        if data.startswith(b"ID3", offset) and offset + 10 <= len(data):
            a, b, c, d = data[offset + 6 : offset + 10]
            offset += 10 + (a << 21 | b << 14 | c << 7 | d)
            continue
        frame = _frame(data, offset)
        # Where the last one did not lead here, it must lead to another: other bytes may look like one.
        if frame is None or not (in_step or _leads_on(data, offset + frame[0])):
            false_starts += 1
            if false_starts > _MOST_FALSE_STARTS:
                raise ValueError("most of it is not MPEG audio")
            offset, in_step = data.find(b"\xff", offset + 1), False
            continue
        size, count = frame
        if offset + size > len(data):
            break
        if not samples:
            stated = _stated_frames(data[offset : offset + size])
            stated = stated * count if stated is not None else None
        samples, longest, offset, in_step = samples + count, max(longest, count), offset + size, True
    return MpegLength(samples, stated, 4 * longest) if samples else None


def _leads_on(data: bytes, offset: int) -> bool:
    return offset >= len(data) or _frame(data, offset) is not None or data[offset : offset + 3] in (b"TAG", b"ID3")


def _frame(data: bytes, offset: int) -> tuple[int, int] | None:
    """Returns bytes and samples of the frame that begins here; None if none does, or its bit rate is free."""
    head = int.from_bytes(data[offset : offset + 4], "big")
    (version, divisor), layer = _VERSIONS[head >> 19 & 3], 4 - (head >> 17 & 3)
    bits, rate = head >> 12 & 15, head >> 10 & 3
    if offset + 4 > len(data) or head >> 21 != 0x7FF or not version or layer == 4 or bits in (0, 15) or rate == 3:
        return None
    bit_rate = 1000 * _BIT_RATES[version, layer][bits - 1]
    sampling_rate, padding = _SAMPLING_RATES[rate] // divisor, head >> 9 & 1
    if layer == 1:
        return (12 * bit_rate // sampling_rate + padding) * 4, 384
    samples = 1152 if layer == 2 or version == 1 else 576
    return samples // 8 * bit_rate // sampling_rate + padding, samples


def _stated_frames(frame: bytes) -> int | None:
    """Returns the number of frames in the first frame's table of contents (Xing, Info), None without one."""
    start = max(frame[:64].find(b"Xing"), frame[:64].find(b"Info"))
    if start < 0 or start + 12 > len(frame) or not frame[start + 7] & 1:
        return None
    return int.from_bytes(frame[start + 8 : start + 12], "big")
