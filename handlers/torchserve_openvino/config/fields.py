"""The value types of configuration sections: strict where YAML is loose, with error messages of our own."""

import re
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, PlainValidator

from torchserve_openvino.config.spelling import listed, nearest, shown
from torchserve_openvino.config.vocabulary import FALLBACK_KINDS, MAX_NUMBER, FallbackKind

# --- times and sizes as people write them: 10m, 8GB ---------------------------------------------------------------


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
# A year: a longer time is a typo.
_MOST_SECONDS = 366 * 86400.0


def seconds_of(value: Any) -> float:
    """Returns a time in seconds.

    Args:
        value: A number of seconds, or a number with one of the units s, m, h and d: ``90s``, ``10m``, ``1.5h``.

    Raises:
        ValueError: It is something else, not more than 0, or more than a year.
    """
    seconds = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # An integer may be too long for a float.
        seconds = float(value) if abs(value) <= _MOST_SECONDS else None
    elif isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", value)):
        seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds is None or not 0 < seconds <= _MOST_SECONDS:
        raise ValueError(f"must be a time such as 90s, 10m or 2h, or a number of seconds, not {shown(value)}.")
    return seconds


def bytes_of(value: str) -> int:
    """Returns a size in bytes.

    Args:
        value: A number with one of the units B, KB, MB, GB, TB (powers of 1000) and KiB to TiB (of 1024).

    Raises:
        ValueError: It is something else, or not more than 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    size = float(match[1]) * _BYTES[match[2].upper()] if match and match[2].upper() in _BYTES else 0
    if not 1 <= size < 2**60:
        raise ValueError(f"must be a size such as 500MB, 8GB or 4GiB, not {value!r:.50}")
    return int(size)


# --- the value types of configuration sections: strict where YAML is loose, with error messages of our own --------


# Path from a handler to a module: attribute names and list indices.
_PATH = re.compile(r"(self\.)?[A-Za-z_]\w*(\.\w+|\[\d+\])*")

# Width and height of a picture in pixels.
PICTURE_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")

DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
)
# Other names of the same.
_SHORT_DTYPES = {
    "float": "float32", "fp32": "float32", "f32": "float32", "double": "float64", "half": "float16", "fp16": "float16",
    "bf16": "bfloat16", "long": "int64", "int": "int32", "integer": "int64",
}  # fmt: skip

# Formats of images whose decoders read bounded memory and start no program, by Pillow's names.
ImageFormat = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "ICO", "JPEG2000", "PPM", "TGA"]
IMAGE_FORMATS: tuple[str, ...] = get_args(ImageFormat)

# TorchServe's own handlers, as its archiver names them.
TORCHSERVE_HANDLERS = ("image_classifier", "image_segmenter", "object_detector", "text_classifier")

# More than any machine has or any batch needs: a larger number is a typo, and would crash the worker.
MAX_THREADS = 1024
MAX_BATCH = 65_536


class UnknownWordError(ValueError):
    """A word that is not among the valid ones; carries the nearest valid word, if any."""

    def __init__(self, message: str, suggestion: str | None) -> None:
        super().__init__(message)
        self.suggestion = suggestion


def _integer(value: Any) -> Any:
    # pydantic would take true for 1 and "8" for 8.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be an integer, not {shown(value)}.")
    return value


def _number(value: Any) -> Any:
    # YAML 1.1 reads 1e-3 (no point) as a string.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"must be a number, not {shown(value)}.") from None
    # NaN is not below the limit either; an integer may be too long for `math.isfinite`.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_NUMBER:
        raise ValueError(f"must be a number, not {shown(value)}.")
    return float(value)


def _boolean(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {shown(value)}.")
    return value


def _freeze(value: Any) -> Any:
    if value == "auto" or isinstance(value, bool):
        return value
    raise UnknownWordError(f"must be auto, true or false, not {shown(value)}.", nearest(str(value), ["auto"]))


def _off(value: Any) -> Any:
    # YAML 1.1 reads a bare `off` as false.
    return "off" if value is False else value


def _all_lengths(value: Any) -> Any:
    """Returns `auto`, or the lengths in ascending order without duplicates."""
    if value == "auto":
        return value
    sizes = value if isinstance(value, (list, tuple)) else [value]
    if not sizes or not all(_is_count(size) for size in sizes):
        message = f"must be auto or a list of integers of at least 1, not {shown(value)}."
        raise UnknownWordError(message, nearest(str(value), ["auto"]))
    return sorted(set(sizes))


def _sizes(value: Any) -> Any:
    """Returns `auto`, or the batch sizes in ascending order without duplicates."""
    sizes = _all_lengths(value)
    if sizes != "auto" and max(sizes) > MAX_BATCH:
        raise ValueError(f"contains {max(sizes)}; the maximum batch size is {MAX_BATCH}.")
    return sizes


def _image_formats(value: Any) -> Any:
    """Returns names of formats, in capitals as Pillow has them, without duplicates."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"must be a list of formats such as [JPEG, PNG], not {shown(value)}.")
    for name in names:
        if name.upper() not in IMAGE_FORMATS:
            hint = nearest(name, IMAGE_FORMATS)
            raise UnknownWordError(f"contains {shown(name)}; valid formats: {listed(IMAGE_FORMATS)}.", hint)
    return list(dict.fromkeys(name.upper() for name in names))


def _threads(value: Any) -> Any:
    if value == "auto" or (_is_count(value) and value <= MAX_THREADS):
        return value
    if _is_count(value):
        raise ValueError(f"is {value}; the maximum is {MAX_THREADS}.")
    message = f"must be auto or an integer of at least 1, not {shown(value)}."
    raise UnknownWordError(message, nearest(str(value), ["auto"]))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _kinds(value: Any) -> Any:
    if value == "all":
        return value
    kinds = value if isinstance(value, (list, tuple)) else [value]
    for kind in kinds:
        if kind not in FALLBACK_KINDS:
            hint = nearest(str(kind), (*FALLBACK_KINDS, "all"))
            raise UnknownWordError(f"must be all or a list of {listed(FALLBACK_KINDS)}, not {shown(kind)}.", hint)
    return list(dict.fromkeys(kinds))


def _dtype(value: Any) -> Any:
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        suggestion = _SHORT_DTYPES.get(name.lower()) or nearest(name, DTYPES)
        raise UnknownWordError(f"must be one of {listed(DTYPES)}, not {shown(value)}.", suggestion)
    return name


def _axis(value: Any) -> Any:
    """Accepts a size, or the name of a dimension whose size varies."""
    if _is_count(value) or (isinstance(value, str) and value.isidentifier()):
        return value
    raise ValueError(f"must be an integer of at least 1 or the name of a free dimension, not {shown(value)}.")


def _lengths(value: Any) -> Any:
    """Returns the compiled lengths of a named dimension; below a single number, adds the powers of two from 16."""
    if _is_count(value):
        powers = [2**n for n in range(4, value.bit_length()) if 2**n < value]
        return [*powers, value]
    if not isinstance(value, (list, tuple)) or not value or not all(_is_count(size) for size in value):
        raise ValueError(f"must be the largest length or a list of lengths of at least 1, not {shown(value)}.")
    return sorted(set(value))


def _picture_sizes(value: Any) -> Any:
    """Returns `auto`, or the sizes as ``WIDTHxHEIGHT``, in the order in which they are given."""
    if value == "auto":
        return value
    sizes = value if isinstance(value, (list, tuple)) else [value]
    if not sizes or not all(isinstance(size, str) and PICTURE_SIZE.fullmatch(size) for size in sizes):
        message = f"must be auto or a list of sizes such as 512x512 (width x height), not {shown(value)}."
        raise UnknownWordError(message, nearest(str(value), ["auto"]))
    return list(dict.fromkeys(sizes))


def _files(value: Any) -> Any:
    """Returns a list of file names in the archive, from one name or a list."""
    names = value if isinstance(value, (list, tuple)) else [value]
    for name in names:
        if not isinstance(name, str) or not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise ValueError(f"must name files of the archive, such as my_ops.py, not {shown(name)}.")
    return list(dict.fromkeys(names))


def is_handler_file(name: str) -> bool:
    """Whether `wrap` names a Python file; otherwise it names a handler of TorchServe."""
    return name.endswith(".py")


def _handler_file(value: Any) -> Any:
    """Returns the name of a Python file in the archive, which can be imported by it, or of a handler of TorchServe."""
    name = str(value)
    is_file = is_handler_file(name) and name.removesuffix(".py").isidentifier()
    if not isinstance(value, str) or not (is_file or name in TORCHSERVE_HANDLERS):
        raise ValueError(
            "must name a Python file of the archive, such as my_handler.py, or a handler of TorchServe "
            f"({', '.join(TORCHSERVE_HANDLERS)}), not {shown(value)}."
        )
    return name


def _python_file(value: Any) -> Any:
    """Returns the name of a Python file in the archive, which can be imported by it."""
    if not isinstance(value, str) or not (is_handler_file(value) and value.removesuffix(".py").isidentifier()):
        raise ValueError(f"must name a Python file of the archive, such as scrub.py, not {shown(value)}.")
    return value


def _paths(value: Any) -> Any:
    """Returns a list of module paths in a handler, from one path or a list."""
    paths = value if isinstance(value, (list, tuple)) else [value]
    for path in paths:
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            raise ValueError(
                f"must name modules of the handler, such as model.encoder or models[0], not {shown(path)}."
            )
    return list(dict.fromkeys(path.removeprefix("self.") for path in paths))


def _folder(value: Any) -> Any:
    if not isinstance(value, str) or not PurePath(value).is_absolute():
        raise ValueError(
            f"must be an absolute path, such as /var/lib/mismatches, not {shown(value)}: a worker runs in a temporary "
            "folder, which is deleted with it."
        )
    return value


Integer = Annotated[int, BeforeValidator(_integer)]
Count = Annotated[Integer, Field(ge=1)]
Number = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[Number, Field(gt=0.0)]
NotNegative = Annotated[Number, Field(ge=0.0)]
# A time, in seconds once it is read.
Duration = Annotated[float, PlainValidator(seconds_of, json_schema_input_type=Positive | str)]
Boolean = Annotated[bool, BeforeValidator(_boolean)]
# JSON schema of a value that is one string or a list of strings.
_Names = list[str] | str
Sizes = Annotated[
    Literal["auto"] | list[int], PlainValidator(_sizes, json_schema_input_type=Literal["auto"] | list[Count])
]
AllLengths = Annotated[
    Literal["auto"] | list[int], PlainValidator(_all_lengths, json_schema_input_type=Literal["auto"] | list[Count])
]
Threads = Annotated[Literal["auto"] | int, PlainValidator(_threads, json_schema_input_type=Literal["auto"] | Count)]
Freeze = Annotated[Literal["auto"] | bool, PlainValidator(_freeze, json_schema_input_type=Literal["auto"] | bool)]
Kinds = Annotated[
    Literal["all"] | list[str],
    PlainValidator(_kinds, json_schema_input_type=Literal["all"] | list[FallbackKind] | FallbackKind),
]
_PictureSize = Annotated[str, Field(pattern=f"^{PICTURE_SIZE.pattern}$")]
_DTypeName = Annotated[str, Field(pattern=rf"^(torch\.)?({'|'.join(DTYPES)})$")]
DType = Annotated[str, PlainValidator(_dtype, json_schema_input_type=_DTypeName)]
Axis = Annotated[int | str, PlainValidator(_axis, json_schema_input_type=Count | str)]
Lengths = Annotated[list[int], PlainValidator(_lengths, json_schema_input_type=Count | list[Count])]
PictureSizes = Annotated[
    Literal["auto"] | list[str],
    PlainValidator(_picture_sizes, json_schema_input_type=Literal["auto"] | list[_PictureSize] | _PictureSize),
]
ImageFormats = Annotated[list[str], PlainValidator(_image_formats, json_schema_input_type=list[ImageFormat])]
Files = Annotated[list[str], PlainValidator(_files, json_schema_input_type=_Names)]
PythonFile = Annotated[str, PlainValidator(_python_file, json_schema_input_type=str)]
HandlerFile = Annotated[str, PlainValidator(_handler_file, json_schema_input_type=str)]
Paths = Annotated[list[str], PlainValidator(_paths, json_schema_input_type=_Names)]
Folder = Annotated[str, PlainValidator(_folder, json_schema_input_type=str)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Against = Annotated[Literal["eager", "off"], BeforeValidator(_off)]
Share = Annotated[Number, Field(ge=0.0, le=1.0)]
SomeShare = Annotated[Number, Field(gt=0.0, le=1.0)]
OnViolation = Literal["refuse", "warn"]
Channels = tuple[Number, Number, Number]
