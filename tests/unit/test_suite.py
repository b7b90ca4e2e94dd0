"""Which tests run: tests/conftest.py and tests/suite/ on a small suite, the merged results, what a change touches."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.quick(rows=[1, 3], kind=["a"])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("kind", ["a", "b"])
def test_by_values(rows, kind): pass

@pytest.mark.quick("one", "two-x")
@pytest.mark.parametrize("name", ["one", "two-x", "three"])
def test_by_names(name): pass
"""
QUICK = {"plain", "by_values[a-1]", "by_values[a-3]", "by_names[one]", "by_names[two-x]"}
ALL = QUICK | {"slow", "by_values[a-2]", "by_values[b-1]", "by_values[b-2]", "by_values[b-3]", "by_names[three]"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_small.py").write_text(SMALL, encoding="utf-8")
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[set[str], str]:
    """Returns the tests that ran, and what pytest printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "scripts")])}
    command = [sys.executable, "-m", "pytest", "-v", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command += arguments or (str(folder),)
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return set(re.findall(r"::test_(\S+) PASSED", found.stdout)), found.stdout + found.stderr


def test_the_quick_suite_is_what_the_markers_say(folder: Path) -> None:
    assert run(folder)[0] == QUICK
    assert run(folder, "--all", str(folder))[0] == ALL


def test_a_file_given_by_name_runs_whole(folder: Path) -> None:
    assert run(folder, str(folder / "test_small.py"))[0] == ALL


@pytest.mark.parametrize(("before", "after"), [('"two-x"', '"two-y"'), ("rows=[1, 3]", "rows=[1, 7]")])
def test_a_name_that_is_no_case_is_an_error(folder: Path, before: str, after: str) -> None:
    (folder / "test_small.py").write_text(SMALL.replace(before, after, 1), encoding="utf-8")
    ran, printed = run(folder)
    assert not ran
    assert "its marker quick names" in printed
    assert after.partition("=")[2].strip("[1, ]") in printed


def test_parts_make_the_whole(folder: Path) -> None:
    parts = [run(folder, "--all", "--shard", f"{number}/3", str(folder))[0] for number in (1, 2, 3)]
    assert all(parts)
    assert sum(map(len, parts)) == len(ALL)
    assert set.union(*parts) == ALL
    assert "'4/3' is no part" in run(folder, "--shard", "4/3", str(folder))[1]


def test_results_are_merged_and_a_failure_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "test_small.py").write_text(SMALL + "\ndef test_wrong(): assert False\n", encoding="utf-8")
    files = [str(tmp_path / f"{number}.xml") for number in (1, 2)]
    for number, file in enumerate(files, 1):
        run(folder, "--all", "--shard", f"{number}/2", "--junitxml", file, str(folder))
    command = [sys.executable, str(ROOT / "scripts" / "test_results.py"), "--json", *files]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    (results,) = json.loads(found.stdout).values()
    assert (results["passed"], results["skipped"], results["failed"]) == (len(ALL), 0, ["test_small.py::test_wrong"])
    assert found.returncode == 1


def test_what_a_change_touches() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import affected_tests

    def reach(file: str) -> set[str]:
        return {test for test in affected_tests._tests() if affected_tests._way(test, {file}) is not None}

    assert "tests/unit/report/" in str(reach("handlers/torchserve_openvino/report/__init__.py"))
    pictures = reach("handlers/torchserve_openvino/tasks/pictures/handler.py")
    assert "tests/unit/tasks/test_pictures.py" in pictures
    assert "tests/unit/ops/test_table.py" not in pictures
    # Names that packages load when they are first used.
    package = "handlers/torchserve_openvino"
    assert {"tests/unit/config/test_config_serving.py", "tests/e2e/test_after_ready.py"} <= reach(
        f"{package}/config/serving.py"
    )
    assert "tests/unit/ops/test_table.py" in reach(f"{package}/backend/entry.py")
    # What a server runs, and processes that start by a module's name.
    for file in ("hosts/kserve.py", "entrypoints/text/text_generator.py", "tasks/generation/generator.py"):
        assert "tests/e2e/test_text_generation.py" in reach(f"{package}/{file}")
    assert "tests/unit/doctor/test_stock.py" in reach(f"{package}/doctor/bisecting/stock_worker.py")
    assert "tests/unit/test_documents.py" in reach("docs/limits.md")


def test_a_file_that_is_not_imported_is_a_failure(folder: Path, tmp_path: Path) -> None:
    (folder / "test_broken.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    run(folder, "--junitxml", str(tmp_path / "some.xml"), "--continue-on-collection-errors", str(folder))
    command = [sys.executable, str(ROOT / "scripts" / "test_results.py"), "--json", str(tmp_path / "some.xml")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    (results,) = json.loads(found.stdout).values()
    assert results["failed"] == ["test_broken.py"] and results["passed"] == len(QUICK) and found.returncode == 1
