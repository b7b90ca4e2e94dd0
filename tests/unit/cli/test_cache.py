import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchserve_openvino.cache.open import CacheSettings, open_cache
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.cli import app
from torchserve_openvino.cli.cache import age_of, default_dir, size_of

KEYS = {"call": "a1" * 32, "partition": "b2" * 32, "blob": "a3" * 32}


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "cache")
    versions = {"torch": "2.13.0", "openvino": "2026.4"}
    store.put("call", KEYS["call"], fields={"model": "net", **versions}, body={})
    store.put("partition", KEYS["partition"], fields=versions, body={}, files={"model.bin": b"w" * 1_500_000})
    fields = {"device": "CPU", "capabilities": {"cpu": "AVX512 [bold]"}}
    store.put("blob", KEYS["blob"], fields=fields, body={}, files={"blob": b"b" * 10})
    return store


@pytest.fixture
def run(store):
    runner = CliRunner()

    def call(*args: object, folder: Path | None = store.root, **more):
        where = ["--dir", str(folder)] if folder else []
        return runner.invoke(app, ["cache", *map(str, args), *where], **more)

    return call


def damage(store: Store) -> None:
    path = store.objects.path_of(store.load("partition", KEYS["partition"]).files["model.bin"].digest)
    path.write_bytes(b"x" * 1_500_000)


def test_ls(run, store):
    store.get("call", KEYS["call"])
    result = run("ls")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == ["call", "blob", "partition"]
    assert KEYS["call"][:12] in rows[0] and "net" in rows[0] and "2.13.0" in rows[0]
    assert "AVX512 [bold]" in rows[1] and "1.5 MB" in rows[2]
    assert f"3 entries, 1.5 MB in {store.root}" in result.stdout


def test_ls_as_json(run, store):
    answer = json.loads(run("ls", "--json").stdout)
    assert {entry["key"]: entry["kind"] for entry in answer["entries"]} == {key: kind for kind, key in KEYS.items()}
    assert answer["total"]["entries"] == 3 and answer["unreadable"] == 0 and answer["dir"] == str(store.root)
    assert answer["entries"][0]["fields"]["device"] == "CPU"


def test_ls_tells_what_it_cannot_read(run, store):
    next((store.root / "entries" / "call").iterdir()).write_bytes(b"damaged")
    result = run("ls")
    assert result.exit_code == 0 and "not shown: 1 damaged " in result.stdout


def test_looking_changes_nothing(run, store):
    def state():
        return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in store.root.rglob("*")}

    damage(store)
    before = state()
    for args in (["ls"], ["ls", "--json"], ["verify"], ["verify", "--json"]):
        run(*args)
    assert state() == before


@pytest.mark.parametrize("args", [["ls"], ["verify"], ["prune"], ["clear", "--yes"]])
def test_a_folder_that_does_not_exist(run, tmp_path, args):
    result = run(*args, folder=tmp_path / "absent")
    assert result.exit_code == 0 and "does not exist" in result.stderr
    assert not (tmp_path / "absent").exists()


def test_a_folder_that_is_refused(run, store):
    store.root.chmod(0o770)
    for args in (["ls"], ["verify"], ["prune"], ["clear", "--yes"], ["export", "x.tar"], ["import", "x.tar"]):
        result = run(*args)
        assert result.exit_code == 1 and f"chmod go-w {store.root}" in result.stderr


def test_verify(run, store):
    result = run("verify")
    assert result.exit_code == 0 and "all in order" in result.stdout
    assert json.loads(run("verify", "--json").stdout) == {"dir": str(store.root), "ok": True, "problems": []}
    damage(store)
    result = run("verify")
    assert result.exit_code == 1 and "does not match its checksum" in result.stdout
    result = run("verify", "--json")
    (problem,) = json.loads(result.stdout)["problems"]
    assert result.exit_code == 1 and (problem["kind"], problem["key"]) == ("partition", KEYS["partition"])


def test_prune_by_size(run, store):
    store.get("partition", KEYS["partition"])
    result = run("prune", "--to", "1.6MB", "--json")
    assert json.loads(result.stdout)["freed"]["entries"] == 0
    assert run("prune").exit_code == 0 and store.size().entries == 3
    result = run("prune", "--to", "1000B")
    assert result.exit_code == 0 and "dropped: 3 entries" in result.stdout
    assert store.size().entries == 0


def test_prune_by_age(run, store):
    old = time.time() - 31 * 86400
    os.utime(store.root / "entries" / "blob" / f"{KEYS['blob']}.json", (old, old))
    answer = json.loads(run("prune", "--older-than", "30d", "--json").stdout)
    assert (answer["freed"]["entries"], answer["left"]["entries"]) == (1, 2)
    assert store.get("blob", KEYS["blob"]) is None


@pytest.mark.parametrize(
    "text, size", [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2MiB", 2**21), ("7", 7), ("1t", 10**12)]
)
def test_sizes(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize("text, age", [("30d", 2592000), ("1.5h", 5400), ("2 w", 1209600), ("10s", 10), ("3m", 180)])
def test_ages(text, age):
    assert age_of(text) == age


@pytest.mark.parametrize(
    "args", [["prune", "--to", "-5"], ["prune", "--to", "much"], ["prune", "--older-than", "30"], ["export"], ["other"]]
)
def test_usage(run, store, args):
    result = run(*args)
    assert result.exit_code == 2
    assert store.size().entries == 3


def test_export_and_import(run, store, tmp_path):
    result = run("export", tmp_path / "all.tar")
    assert result.exit_code == 0 and "3 entries" in result.stdout
    result = run("import", tmp_path / "all.tar", folder=tmp_path / "new")
    assert result.exit_code == 0 and "3 entries" in result.stdout
    assert Store(tmp_path / "new").get("blob", KEYS["blob"]).read("blob") == b"b" * 10


def test_export_of_some(run, store, tmp_path):
    assert run("export", tmp_path / "some.tar", "a1a1", KEYS["blob"]).exit_code == 0
    assert "2 entries" in run("import", tmp_path / "some.tar", folder=tmp_path / "new").stdout
    for bad in ("a", "ffff"):
        result = run("export", tmp_path / "none.tar", bad)
        assert result.exit_code == 2 and not (tmp_path / "none.tar").exists()


def test_a_damaged_entry_is_not_exported(run, store, tmp_path):
    damage(store)
    result = run("export", tmp_path / "all.tar")
    assert result.exit_code == 1 and "does not match" in result.stdout and "2 entries" in result.stdout
    assert run("import", tmp_path / "all.tar", folder=tmp_path / "new").exit_code == 0


def test_a_bad_archive(run, tmp_path):
    (tmp_path / "bad.tar").write_bytes(b"no tar" * 1000)
    result = run("import", tmp_path / "bad.tar")
    assert result.exit_code == 1 and "invalid tar header" in result.stdout
    result = run("import", tmp_path / "absent.tar")
    assert result.exit_code == 1 and "No such file" in result.stderr
    result = run("export", tmp_path / "absent" / "x.tar")
    assert result.exit_code == 1 and "No such file" in result.stderr


def test_clear_asks(run, store):
    assert run("clear", input="n\n").exit_code == 1 and store.size().entries == 3
    assert run("clear", input="").exit_code == 1 and store.size().entries == 3
    result = run("clear", input="y\n")
    assert result.exit_code == 0 and "Drop 3 entries" in result.stderr and store.size().entries == 0


def test_clear_without_asking(run, store):
    assert run("clear", "--yes").exit_code == 0 and store.size() == (0, 0, 0)


@pytest.mark.parametrize(
    "given, expected",
    [(None, "xdg/torchserve-openvino"), ("mine", "xdg/torchserve-openvino/mine"), ("/else/../where", "/where")],
)
def test_the_folder_is_that_of_the_backend(monkeypatch, tmp_path, given, expected):
    from torchserve_openvino.config import resolve_options

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("OPENVINO_TORCH_CACHE_DIR", raising=False)
    if given is not None:
        monkeypatch.setenv("OPENVINO_TORCH_CACHE_DIR", given)
    assert default_dir() == tmp_path / expected
    options = resolve_options({"model_caching": True}, check_device=False).options
    assert str(default_dir()) == options.cache_dir


def test_the_default_is_used(run, store, monkeypatch):
    monkeypatch.setenv("OPENVINO_TORCH_CACHE_DIR", str(store.root))
    assert "3 entries" in run("ls", folder=None).stdout
    assert run(folder=None).exit_code == 2


@pytest.mark.parametrize("command", ["ls", "verify", "prune", "export", "import", "clear"])
def test_help_with_examples(command):
    result = CliRunner().invoke(app, ["cache", command, "--help"])
    assert result.exit_code == 0
    assert f"torchserve-openvino cache {command}" in result.stdout.partition("Examples:")[2]


def test_problems_end_with_code_1(run, store, tmp_path):
    """Also for an import, although the intact entries are imported."""
    run("export", tmp_path / "all.tar")
    data = bytearray((tmp_path / "all.tar").read_bytes())
    data[data.index(b"b" * 10)] ^= 1
    (tmp_path / "all.tar").write_bytes(data)
    result = run("import", tmp_path / "all.tar", folder=tmp_path / "new")
    assert result.exit_code == 1 and "2 entries" in result.stdout and KEYS["blob"][:12] in result.stdout


def test_the_default_of_a_url_is_what_this_machine_has_of_it(monkeypatch, tmp_path) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OPENVINO_TORCH_CACHE_DIR", "memory://bucket/cache")
    opened = open_cache("memory://bucket/cache", CacheSettings())
    assert default_dir() == opened.root


def test_a_large_bundle_is_imported_into_a_cache_that_may_be_as_large(run, store, tmp_path) -> None:
    run("export", tmp_path / "warm.tar")
    refused = run("import", tmp_path / "warm.tar", "--limit", "0.001", folder=tmp_path / "small")
    assert refused.exit_code == 1 and "too large for a cache of 1000000 bytes" in " ".join(refused.output.split())
    assert run("import", tmp_path / "warm.tar", "--limit", "1", folder=tmp_path / "large").exit_code == 0
