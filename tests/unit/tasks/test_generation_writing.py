"""Text as it is generated: no half characters, and nothing of a stop text, however tokens cut them."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from chat_models import PROMPTS, tokenizer
from torchserve_openvino.generation.text.engine import GeneratedToken
from torchserve_openvino.tasks.generation.answers import Completion
from torchserve_openvino.tasks.generation.detokenizer import Detokenizer, PlacedToken, TextWriter
from torchserve_openvino.tasks.generation.reading import GenerationRequest

WORDS = tokenizer()
TEXT = "A model 🙂 is served — ünïcode, 数字 and 👩‍👩‍👧, once more."


def decode(tokens: list[int]) -> str:
    return WORDS.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def ids(text: str) -> list[int]:
    return WORDS(text, add_special_tokens=False)["input_ids"]


def bytes_of(text: str) -> list[int]:
    """The tokens of a text's single bytes, as a model may choose them."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = "".join(piece for piece, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text))
    return [WORDS.convert_tokens_to_ids(letter) for letter in letters]


def written(tokens: list[int], *stops: str) -> tuple[str, list[str], TextWriter]:
    """The text, its pieces, and the writer."""
    writer = TextWriter(decode, stops, text_of=lambda token: decode([token]), special=frozenset(WORDS.all_special_ids))
    pieces = []
    for token in tokens:
        goes_on = writer.add(GeneratedToken(token))
        pieces.append(writer.take().text)
        if not goes_on:
            break
    writer.end()
    pieces.append(writer.take().text)
    return "".join(pieces), pieces, writer


@pytest.mark.parametrize("text", [TEXT, *PROMPTS])
@pytest.mark.parametrize("tokens_of", [ids, bytes_of])
def test_pieces_are_whole_characters_and_make_the_text(text: str, tokens_of) -> None:
    whole, pieces, _ = written(tokens_of(text))
    assert whole == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_byte_that_is_no_character_is_shown_once_it_is_certain() -> None:
    broken = bytes_of("é")[:1]
    assert written([*broken, *ids(" a")])[0] == "\ufffd a"
    # At the end it may be the first half of one.
    assert written([*ids("a"), *broken])[0] == "a"


def test_tokens_without_sense_decode_as_they_do_together() -> None:
    draw = random.Random(3)
    for _ in range(200):
        tokens = [draw.randrange(6, len(WORDS)) for _ in range(draw.randint(1, 60))]
        assert written(tokens)[0] == decode(tokens).rstrip("\ufffd")


def test_endless_nonsense_is_not_kept_forever() -> None:
    detokenizer = Detokenizer(decode)
    (half,) = bytes_of("é")[:1]
    pieces = [detokenizer.add(half) for _ in range(500)]
    assert len("".join(pieces)) >= 500 - 64


def test_special_tokens_are_no_text_and_are_not_listed_at_the_end() -> None:
    tokens = [*ids("a model"), WORDS.eos_token_id]
    writer = TextWriter(decode, (), text_of=lambda token: decode([token]), special=frozenset(WORDS.all_special_ids))
    for token in tokens:
        writer.add(GeneratedToken(token))
    writer.end()
    delta = writer.take()
    assert delta.text == "a model" and [each.token.id for each in delta.tokens] == tokens[:-1]


@pytest.mark.parametrize("stop", ["served", " is ser", "🙂", "d — ü", "字 and 👩", "A", ", once more."])
@pytest.mark.parametrize("tokens_of", [ids, bytes_of])
def test_nothing_of_a_stop_text_is_written(stop: str, tokens_of) -> None:
    whole, pieces, writer = written(tokens_of(TEXT), stop, "never there")
    assert whole == TEXT[: TEXT.index(stop)] and writer.stopped
    # Not even a part of it, which would have to be taken back.
    for piece in itertools.accumulate(pieces):
        assert whole.startswith(piece)


def test_the_first_of_several_stop_texts_counts() -> None:
    assert written(ids("one two three four"), "three", "two t", "four")[0] == "one "


def test_the_beginning_of_a_stop_text_that_does_not_go_on_is_text() -> None:
    whole, pieces, writer = written(ids("a mod"), "model")
    assert whole == "a mod" and not writer.stopped and pieces[-1] == "mod"
    assert written(ids("abc abc abd"), "abcd")[0] == "abc abc abd"


def test_tokens_come_with_their_text() -> None:
    writer = TextWriter(decode, ("served",), text_of=lambda token: decode([token]))
    listed = []
    for token in ids(TEXT):
        goes_on = writer.add(GeneratedToken(token))
        delta = writer.take()
        listed += delta.tokens
        if not goes_on:
            break
    kept = TEXT[: TEXT.index("served")]
    assert all(each.offset < len(kept) for each in listed)
    assert [each.offset for each in listed] == sorted(each.offset for each in listed)
    assert decode([each.token.id for each in listed]).startswith(kept.rstrip())


def test_of_tokens_with_one_text_the_most_probable_one_is_listed() -> None:
    asked = GenerationRequest("completion", ())
    placed = PlacedToken(GeneratedToken(1, -0.1, ((1, -0.1), (2, -2.0), (3, -3.0))), 0, "x")
    found = Completion(asked, "net", lambda token: "y" if token == 3 else "x")._by_text(placed)
    assert found == {"x": -0.1, "y": -3.0}


class Bytes:
    """Decodes as Llama's tokenizer does: a space before each word, dropped at the beginning; a token for each byte."""

    WORDS = ("", "\u2581one", "\u2581two", "s")

    @classmethod
    def decode(cls, tokens: Sequence[int]) -> str:
        raw = b"".join(bytes([t - 100]) if t >= 100 else cls.WORDS[t].replace("\u2581", " ").encode() for t in tokens)
        text = "".join(cls._characters(raw))
        return text.removeprefix(" ")

    @staticmethod
    def _characters(raw: bytes) -> Iterator[str]:
        # As decoders of `tokenizers` do: what is no character is one broken one for each byte.
        try:
            yield raw.decode()
        except UnicodeDecodeError as error:
            yield raw[: error.start].decode()
            yield from "\ufffd" * (len(raw) - error.start)


def test_characters_of_several_byte_tokens_and_spaces_at_the_beginning() -> None:
    face = [100 + byte for byte in "🙂".encode()]
    for before, start in ((), ""), ((1,), " "):
        for tokens, expected in (([2, 3], "twos"), ([2, *face, 3, *face, 1], "two🙂s🙂 one"), (face, "🙂")):
            writer = TextWriter(Bytes.decode, (), before)
            pieces = []
            for token in tokens:
                writer.add(GeneratedToken(token))
                pieces.append(writer.take().text)
            writer.end()
            text = "".join([*pieces, writer.take().text])
            assert text == (start if tokens[0] < 100 else "") + expected and "\ufffd" not in text
