"""The code in Python source: what is left without comments, docstrings and blank lines, which change no result.

Done by regular expressions, not by Python's own parser: that takes ten times as long, at each start of a worker, and
its output differs between versions of Python, which share entries.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

# A comment, or a string with its prefix, of three quotes or of one.
_TOKEN = re.compile(
    r"#[^\n]*"
    r"|[A-Za-z]{0,2}(?:"
    r'"""(?:[^"\\]|\\.|"(?!""))*"""'
    r"|'''(?:[^'\\]|\\.|'(?!''))*'''"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'(?:[^'\\\n]|\\.)*'"
    r")",
    re.DOTALL,
)
_IDLE = re.compile(r"[ \t]+(?=\n)|\n(?=[ \t]*(?:\n|\Z))")
_LINE_END = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")


def code_of(source: str) -> str:
    """Returns source without comments, docstrings and blank lines; what is in other strings stays."""
    # Code and strings in turn: only code is normalized.
    parts: list[str] = []
    code, end, depth = "", 0, 0
    for token in _TOKEN.finditer(source):
        between = source[end : token.start()]
        code += between
        depth += sum(map(between.count, "([{")) - sum(map(between.count, ")]}"))
        end = token.end()
        if not (token[0].startswith("#") or (not depth and _is_docstring(parts, code, source, end))):
            parts += [_IDLE.sub("", code), token[0]]
            code = ""
    parts.append(_IDLE.sub("", code + source[end:]))
    return "".join(parts).lstrip("\n")


def _is_docstring(parts: list[str], code: str, source: str, end: int) -> bool:
    """Returns True if a string outside brackets is a statement, the first one of a file or behind a colon.

    Args:
        parts: What comes before ``code``.
        code: The code between the previous string and this one.
        source: The source.
        end: Where the string ends.
    """
    before, _, indent = code.rpartition("\n")
    before = before.rstrip()
    first = before.endswith(":") if before else not parts
    return first and not indent.strip() and _LINE_END.match(source, end) is not None


def digest_of_files(root: Path, paths: Iterable[Path]) -> str:
    """Returns a digest of the code in files, and of their paths below ``root``.

    Raises:
        FileNotFoundError: A file is missing.
    """
    digest = blake3()
    for path in paths:
        code = code_of(path.read_text(encoding="utf-8")).encode()
        digest.update(f"{path.relative_to(root).as_posix()}:{len(code)};".encode())
        digest.update(code)
    return digest.hexdigest(length=8)
