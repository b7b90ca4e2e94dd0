import pytest

from torchserve_openvino.config import ConfigErrors
from torchserve_openvino.config.yaml_source import parse_yaml, read_yaml
from torchserve_openvino.errors import ConfigError


def test_places_of_keys():
    source = parse_yaml("a: 1\nb:\n  - c: 2\n  -\n    d: {e: 3}\n", "f.yaml")
    assert source.location(("a",)) == "f.yaml:1"
    assert source.location(("b", 0, "c")) == "f.yaml:3"
    assert source.location(("b", 1, "d", "e")) == "f.yaml:5"
    assert source.location(("b", 1, "absent", "x")) == "f.yaml:5"
    assert source.location(("absent",)) == "f.yaml"


def test_duplicate_keys_are_told_all_at_once():
    with pytest.raises(ConfigErrors) as caught:
        parse_yaml("a: 1\nb: {c: 1, c: 2}\na: 3\n", "f.yaml")
    assert [(p.key, p.location) for p in caught.value.problems] == [("b.c", "f.yaml:2"), ("a", "f.yaml:3")]
    assert "first defined on line 1" in str(caught.value)


def test_anchors_and_merges():
    source = parse_yaml("base: &b\n  x: 1\nuse:\n  <<: *b\n  y: 2\nlist: [*b, *b]\n", "f.yaml")
    assert source.data["use"] == {"x": 1, "y": 2}
    assert source.data["list"] == [{"x": 1}, {"x": 1}]
    assert source.location(("use", "y")) == "f.yaml:5"


def test_many_aliases_are_walked_once():
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 12)]
    assert parse_yaml("\n".join(lines), "f.yaml").location(("a11",)) == "f.yaml:12"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", r"f.yaml:\d+: is not valid YAML"),
        ("a: 1\n\tb: 2\n", r"f.yaml:\d+: is not valid YAML"),
        ("- 1\n", "must be a mapping at the top level"),
        ("text", "must be a mapping at the top level"),
        ("a: &x {b: *x}\n", "contains itself"),
        ("[a]: 1\n", "not a plain name"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML"),
        ("a: !!python/object:os.system x\n", "is not valid YAML"),
        ("a: \x07\n", "is not valid YAML"),
        ("a: " + "[" * 50_000 + "]" * 50_000, "nested too deeply"),
        ("{a: " * 2_000 + "1" + "}" * 2_000, "nested too deeply"),
        ("a: " + "9" * 5_000, "a value that cannot be read"),
        ("a: 2026-99-99", "a value that cannot be read"),
        ('a: "\\ud800"', r"f.yaml:1: a: holds a character that is no text"),
        ('"\\ud800": 1', "not a plain name"),
        (
            "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
            "aliases counted",
        ),
        ("a" * 5 * 2**20, "larger than 4 MiB"),
    ],
)
def test_what_is_no_configuration(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "f.yaml")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n"])
def test_nothing_is_an_empty_mapping(text):
    assert parse_yaml(text, "f.yaml").data == {}


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(binary)
