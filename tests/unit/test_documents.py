"""The documents: a short README, valid links, and code that runs.

Shell commands run in tests/e2e/test_readme.py.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import library, nn

import torchserve_openvino as tov
from documents import ROOT, Block, blocks, pages
from torchserve_openvino.config import load_serving_config
from torchserve_openvino.serving.loading.files import load_class
from torchserve_openvino.serving.verification.shadow import MismatchFolder

PAGES = pages()


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].split()) <= 1200


def test_the_readme_leads_to_every_page() -> None:
    assert [page for page in PAGES if page.startswith("docs/") and f"({page})" not in PAGES["README.md"]] == []


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.page)
def test_yaml_is_valid(block: Block) -> None:
    assert load_serving_config(yaml.safe_load(block.text), check_device=False)


def python(start: str) -> str:
    (found,) = [block.text for block in blocks("python") if block.text.startswith(start)]
    return found


def test_compile() -> None:
    model, x = nn.Sequential(nn.Linear(4, 2), nn.ReLU()).eval(), torch.ones(1, 4)
    with torch.no_grad():
        space = {"model": model, "x": x}
        exec(python("import torchserve_openvino as tov"), space)
        torch.testing.assert_close(space["y"], model(x))


def test_other_programs() -> None:
    model, x = nn.Sequential(nn.Linear(4, 2), nn.ReLU()).eval(), torch.ones(1, 4)
    with torch.no_grad():
        space = {"model": model, "x": x}
        exec(python("import torch\n\noptions"), space)
        torch.testing.assert_close(space["y"], model(x))


def test_mapping() -> None:
    operators = library.Library("mylib", "DEF")
    operators.define("scaled_tanh(Tensor x, float scale=1.0) -> Tensor")
    operators.impl("scaled_tanh", lambda x, scale=1.0: x.tanh() * scale, "CompositeExplicitAutograd")
    try:
        exec(python("import openvino.opset13 as ops"), {})
        compiled, x = tov.compile(lambda x: torch.ops.mylib.scaled_tanh(x, 3.0)), torch.randn(4)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(x), 3 * x.tanh())
        assert compiled.report.summary.coverage == 1.0
    finally:
        tov.forget_mappings()


def test_own_handler() -> None:
    from ts.torch_handler.base_handler import BaseHandler

    space = {"TheirHandler": BaseHandler}
    exec(python("from torchserve_openvino import OpenVINOHandler"), space)
    assert issubclass(space["Mine"], tov.OpenVINOHandler)


def test_a_model_file_with_an_imported_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "x.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 3)\n"
    )
    (tmp_path / "documented_model.py").write_text(python("from x import Net"))
    try:
        assert isinstance(load_class(tmp_path, "documented_model.py"), nn.Linear)
    finally:
        sys.modules.pop("x", None)
        sys.modules.pop("documented_model", None)


def test_a_kept_mismatch_is_run_again(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 2).eval(), torch.ones(1, 4)
    answer = model(x).detach()
    assert MismatchFolder(tmp_path).keep("DIGEST", ((x,), {}), [answer + 1], [answer], {}) == ""
    code = python("from pathlib import Path").replace("/var/lib/torchserve-openvino/mismatches", str(tmp_path))
    space = {"model": model}
    exec(code, space)
    assert torch.equal(space["kept"].answer[0], answer + 1)
    assert torch.equal(space["kept"].expected[0], answer)


def test_the_recipe_of_openvinos_page(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchao")
    space: dict[str, object] = {}
    exec(python("import torch\nfrom torchao"), space)
    model, photos = space["quantized"], space["photos"]
    with torch.no_grad():
        torch.testing.assert_close(space["compiled"](photos[1]), model(photos[1]), rtol=0, atol=0.05)
    report = space["compiled"].report
    assert report.summary.coverage == 1.0 and report.summary.partitions == 1 and report.summary.precision == "int8"
    assert "'u8'" in capsys.readouterr().out


def test_no_python_block_is_left_out() -> None:
    # Those of docs/tasks.md run in tests/unit/tasks.
    assert len([block for block in blocks("python") if block.page != "docs/tasks.md"]) == 9


def test_the_worked_example_of_an_operator() -> None:
    rule = python("@decomposition(aten.addbmm.default)")
    matrices = ROOT / "handlers" / "torchserve_openvino" / "ops" / "rules" / "matrices.py"
    assert rule in matrices.read_text(encoding="utf-8")
    space = {"tov": tov, "torch": torch}
    exec(python("def test_addbmm"), space)
    space["test_addbmm"]()  # type: ignore[operator]
