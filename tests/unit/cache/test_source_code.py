"""A digest of source covers code, and neither comments nor docstrings."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from torchserve_openvino.cache.identity import versions
from torchserve_openvino.cache.identity.code_walk import code_of, digest_of_files
from torchserve_openvino.cache.identity.versions import ROOMS, source_digest

SOURCE = Path(versions.__file__).parents[2]
CODE = '''
"""About a module."""
import os

LIMIT = 3  # a number
TEXT = "a # b"
TABLE = {"a":
    """not a docstring"""
}

def f(x):
    """About a function."""
    return """
# kept

""" + f"{x}" + '#'

class C:
    """About a class."""

    y = 1
'''


def reference(source: str) -> list[str]:
    """Returns the tokens of the code, by Python's own parser and tokenizer."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                docstrings.add(first.lineno)
    idle = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        token.string
        for token in tokens
        if token.type not in idle and not (token.type == tokenize.STRING and token.start[0] in docstrings)
    ]


def tokens_of(code: str) -> list[str]:
    # Where a body was a docstring alone, Python's tokenizer still reads the rest.
    return reference_of_tokens(code)


def reference_of_tokens(code: str) -> list[str]:
    idle = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    return [token.string for token in tokenize.generate_tokens(io.StringIO(code).readline) if token.type not in idle]


def test_every_file_of_the_package_keeps_its_code_alone() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        assert tokens_of(code_of(source)) == reference(source), path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # a number", ""),
        ("LIMIT", "# About the limit.\nLIMIT"),
        ('"""About a module."""', '"""Other words, [brackets and "quotes"."""'),
        ('    """About a function."""\n', ""),
        ("About a class.", "About # a class."),
        ("import os\n", "\n\nimport os\n\n\n"),
    ],
)
def test_comments_docstrings_and_blank_lines_change_nothing(old: str, new: str) -> None:
    assert old in CODE
    assert code_of(CODE.replace(old, new, 1)) == code_of(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("a # b", "a # c"),
        ("not a docstring", "another value"),
        ("# kept", "# other"),
        ("# kept\n\n", "# kept\n"),
        ("    y = 1", "y = 1"),
    ],
)
def test_code_and_other_strings_count(old: str, new: str) -> None:
    assert old in CODE
    assert code_of(CODE.replace(old, new, 1)) != code_of(CODE)


def test_a_missing_file_or_room_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        digest_of_files(tmp_path, [tmp_path / "absent.py"])
    with pytest.raises(FileNotFoundError, match="no_such_room"):
        source_digest("no_such_room")


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_of_the_digest_exists(room: str) -> None:
    path = SOURCE / room
    assert path.is_file() or any(path.rglob("*.py"))
    assert re.fullmatch("[0-9a-f]{16}", source_digest(room))
