"""Disabled operators are added to model-config.yaml without changing anything else; unsafe edits are refused."""

import shutil
from pathlib import Path

import pytest

from torchserve_openvino.config import load_serving_config
from torchserve_openvino.doctor.bisecting.yaml_edit import add_disabled_ops, require_disabled_ops
from torchserve_openvino.errors import ConfigError, UnknownOperatorError

CONFIGS = (Path(__file__).resolve().parents[3] / "model-config").glob("*.yaml")
# metrics.yaml is not a model's configuration.
EXAMPLES = sorted(path for path in CONFIGS if path.name != "metrics.yaml")
RELU = "aten.relu.default"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model-config.yaml"


def disabled(path: Path) -> tuple[str, ...]:
    backend = load_serving_config(path, check_device=False).backend
    assert backend is not None
    return backend.options.disabled_ops


def edit(file: Path, text: str, *ops: str) -> str:
    file.write_bytes(text.encode())
    add_disabled_ops(file, ops or [RELU])
    return file.read_bytes().decode()


# Before and after, for every form of pt2 and every YAML style. NEW stands for the entry that is written where there
# was no list.
NEW = "disabled_ops: [aten.relu.default]"
FORMS = {
    "string": ("pt2: openvino   # why\n", "pt2: {backend: openvino, options: {NEW}}   # why\n"),
    "quoted string": ("pt2: 'openvino'\n", "pt2: {backend: 'openvino', options: {NEW}}\n"),
    "mapping": (
        "pt2:\n  backend: openvino  # ours\n\n# next\nbatchSize: 4\n",
        "pt2:\n  backend: openvino  # ours\n  options:\n    NEW\n\n# next\nbatchSize: 4\n",
    ),
    "flow mapping": (
        "pt2: {backend: openvino}  # ours\n",
        "pt2: {backend: openvino, options: {NEW}}  # ours\n",
    ),
    "compile": (
        "pt2:\n    compile:\n        enable: true\n        options:  # of OpenVINO\n            device: CPU\n"
        "            config:\n                # wide\n                PERFORMANCE_HINT: LATENCY  # one\n"
        "\n# ---- Next ----\nbatchSize: 4\n",
        "pt2:\n    compile:\n        enable: true\n        options:  # of OpenVINO\n            device: CPU\n"
        "            config:\n                # wide\n                PERFORMANCE_HINT: LATENCY  # one\n"
        "            NEW\n\n# ---- Next ----\nbatchSize: 4\n",
    ),
    "flow compile": (
        "pt2: {compile: {enable: true, backend: openvino, options: {device: CPU,}}}",
        "pt2: {compile: {enable: true, backend: openvino, options: {device: CPU, NEW,}}}",
    ),
    "empty compile": (
        "pt2:\n  compile:\n",
        "pt2:\n  compile: {enable: true, backend: openvino, options: {NEW}}\n",
    ),
    "null options": (
        "pt2: {compile: {options: ~}}\n",
        "pt2: {compile: {options: {NEW}}}\n",
    ),
    "export": (
        "pt2: {export: {aot_compile: false}}\n",
        "pt2: {export: {aot_compile: false}, compile: {enable: true, backend: openvino, options: {NEW}}}\n",
    ),
    "none": (
        "batchSize: 4  # no more\n# end\n",
        "batchSize: 4  # no more\npt2:\n  compile:\n    enable: true\n    backend: openvino\n    options:\n"
        "      NEW\n# end\n",
    ),
    "null pt2": (
        "pt2:\nbatchSize: 1\n",
        "pt2: {compile: {enable: true, backend: openvino, options: {NEW}}}\nbatchSize: 1\n",
    ),
    "empty file": (
        "# nothing yet",
        "# nothing yet\npt2:\n  compile:\n    enable: true\n    backend: openvino\n    options:\n"
        "      NEW\n",
    ),
    "flow list": (
        "pt2: {options: {disabled_ops: [aten.tanh, 'aten.add'], device: CPU}}\n",
        "pt2: {options: {disabled_ops: [aten.tanh, 'aten.add', aten.relu.default], device: CPU}}\n",
    ),
    "long flow list": (
        "pt2:\n  options:\n    disabled_ops: [\n      aten.tanh,  # wrong\n      aten.add,  # slow\n    ]\n",
        "pt2:\n  options:\n    disabled_ops: [\n      aten.tanh,  # wrong\n      aten.add, "
        "aten.relu.default,  # slow\n    ]\n",
    ),
    "empty list": ("pt2: {options: {disabled_ops: []}}\n", "pt2: {options: {NEW}}\n"),
    "block list": (
        "pt2:\n  options:\n    disabled_ops:\n      - aten.tanh  # wrong\n      # this too\n      - aten.add\n"
        "\n    device: CPU\n",
        "pt2:\n  options:\n    disabled_ops:\n      - aten.tanh  # wrong\n      # this too\n      - aten.add\n"
        "      - aten.relu.default\n\n    device: CPU\n",
    ),
    "block list at the margin": (
        "pt2:\n  options:\n    disabled_ops:\n    - aten.tanh",
        "pt2:\n  options:\n    disabled_ops:\n    - aten.tanh\n    - aten.relu.default\n",
    ),
    "one name": (
        'pt2: {options: {disabled_ops: "aten::tanh"}}  # one\n',
        'pt2: {options: {disabled_ops: ["aten::tanh", aten.relu.default]}}  # one\n',
    ),
    "windows": (
        "pt2:\r\n  backend: openvino\r\n",
        "pt2:\r\n  backend: openvino\r\n  options:\r\n    NEW\r\n",
    ),
    "document start": (
        "---\npt2:\n  options: {device: CPU}\n...\n",
        "---\npt2:\n  options: {device: CPU, NEW}\n...\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), FORMS.values(), ids=list(FORMS))
def test_every_form_gets_one_entry_more(file: Path, before: str, after: str) -> None:
    assert edit(file, before) == after.replace("NEW", NEW)
    assert disabled(file)[-1] == RELU
    # A second call changes nothing.
    assert add_disabled_ops(file, [RELU]) == ""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_keep_every_line(file: Path, example: Path) -> None:
    shutil.copy(example, file)
    before = file.read_text().splitlines()
    diff = add_disabled_ops(file, [RELU, "aten.tanh.default"])
    after = file.read_text().splitlines()
    assert [line for line in after if line in before] == before
    (added,) = [line for line in after if line not in before]
    assert added.strip() == "disabled_ops: [aten.relu.default, aten.tanh.default]"
    assert f"+{added}\n" in diff and diff.startswith("---")
    assert disabled(file) == (RELU, "aten.tanh.default")


@pytest.mark.parametrize("there", ["aten.relu", "aten::relu", "torch.ops.aten.relu.default", "aten.relu.default"])
def test_what_is_disabled_already_is_not_added(file: Path, there: str) -> None:
    text = f"pt2: {{options: {{disabled_ops: ['{there}']}}}}\n"
    assert edit(file, text) == text
    assert edit(file, text, "aten::relu.default", "aten.tanh.default", "aten.tanh.default").count("tanh") == 1


ALIASES = {
    "aliased list": "handler: {mine: &ops [aten.tanh]}\npt2: {options: {disabled_ops: *ops}}\n",
    "anchor elsewhere used": "pt2: {options: {disabled_ops: &ops [aten.tanh]}}\nhandler: {mine: *ops}\n",
    "aliased options": "handler:\n  mine: &o\n    device: CPU\npt2:\n  options: *o\n",
    "merged options": "handler:\n  mine: &o\n    options: {device: CPU}\npt2:\n  <<: *o\n  backend: openvino\n",
}


@pytest.mark.parametrize("text", ALIASES.values(), ids=list(ALIASES))
def test_what_would_change_something_else_is_refused_with_the_line_to_write(file: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"by hand: pt2\.options\.disabled_ops: \[aten\.relu\.default\]"):
        edit(file, text)
    assert file.read_text() == text


def test_an_alias_beside_is_no_hindrance(file: Path) -> None:
    text = "handler: {mine: &c {PERFORMANCE_HINT: LATENCY}}\npt2:\n  options:\n    device: CPU\n    config: *c\n"
    assert edit(file, text) == f"{text}    disabled_ops: [aten.relu.default]\n"


def test_another_backend_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="inductor, which has no option disabled_ops"):
        edit(file, "pt2: inductor\n")
    with pytest.raises(ConfigError, match="inductor, which has no option disabled_ops"):
        require_disabled_ops(file)


def test_no_operators_change_nothing(file: Path) -> None:
    file.write_text("pt2: {backend: openvino}\n")
    require_disabled_ops(file)
    assert add_disabled_ops(file, []) == "" and file.read_text() == "pt2: {backend: openvino}\n"


def test_a_broken_file_stays_as_it_is(file: Path) -> None:
    for text in ("pt2: {options: {devise: CPU}}\n", "pt2: [\n"):
        with pytest.raises(ConfigError):
            edit(file, text)
        assert file.read_text() == text


def test_an_operator_that_torch_lacks_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"model-config.yaml: was not changed.*aten.relu_x") as caught:
        edit(file, "pt2: openvino\n", "aten.relu_x.default")
    assert isinstance(caught.value.__cause__, UnknownOperatorError)
    assert file.read_text() == "pt2: openvino\n"
    assert [each.name for each in file.parent.iterdir()] == [file.name], "nothing is left behind"


def test_mode_and_links_stay(file: Path, tmp_path: Path) -> None:
    file.write_text("pt2: openvino\n")
    file.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    assert str(link) in add_disabled_ops(link, [RELU])
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
    assert disabled(file) == (RELU,)
