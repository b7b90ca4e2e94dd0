"""A store with a copy of its entries in object storage: machines that share nothing else."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cache_helpers import FILES, content, key, put

from torchserve_openvino.cache.open import CacheSettings, open_cache
from torchserve_openvino.cache.storage import bundle
from torchserve_openvino.cache.storage.remote import RemoteStore
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config import resolve_options
from torchserve_openvino.errors import CacheDirectoryError

fsspec = pytest.importorskip("fsspec")

URLS = itertools.count()
# Compiles a model with a cache in object storage; prints what the cache did.
WORKER = """
import json, sys, torch, torchserve_openvino as tov
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).eval()
options = {"model_caching": True, "cache_dir": sys.argv[1], "config": {"INFERENCE_PRECISION_HINT": "f32"}}
compiled = tov.compile(model, options=options)
x = torch.ones(2, 4)
with torch.no_grad():
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
cache = compiled.report.cache
print(json.dumps([cache.traces, cache.compiles, cache.imports]))
"""


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://bucket{next(URLS)}/cache" if request.param == "memory" else f"file://{tmp_path}/bucket"


@pytest.fixture
def machines(url: str, tmp_path: Path) -> tuple[RemoteStore, RemoteStore]:
    return RemoteStore(tmp_path / "first", url), RemoteStore(tmp_path / "second", url)


def test_what_one_machine_stores_the_other_reads(machines: tuple[RemoteStore, RemoteStore]) -> None:
    first, second = machines
    put(first, 1)
    put(first, 2, files={"shared": FILES["model.bin"], "own": b"own" * 100, "empty": b""})
    for number in (1, 2):
        mine, theirs = first.get("partition", key(number)), second.get("partition", key(number))
        assert mine is not None and theirs is not None
        assert content(theirs) == content(mine) and theirs.body == mine.body
    assert second.verify() == [] and second.events.write_failures == 0


def test_an_entry_that_nobody_has(machines: tuple[RemoteStore, RemoteStore]) -> None:
    _, second = machines
    assert second.get("partition", key(9)) is None
    assert second.events.misses == 1 and second.events.write_failures == 0


def test_what_is_here_is_not_fetched(
    machines: tuple[RemoteStore, RemoteStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = machines
    put(first, 1)
    monkeypatch.setattr(first, "_fetch", lambda *_: pytest.fail("fetched"))
    assert first.get("partition", key(1)) is not None


def test_damaged_content_is_refused(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    put(RemoteStore(tmp_path / "first", url), 1)
    (sent,) = (tmp_path / "bucket").rglob("*.tar")
    damaged = bytearray(sent.read_bytes())
    damaged[-2000] ^= 1
    sent.write_bytes(damaged)
    second = RemoteStore(tmp_path / "second", url)
    assert second.get("partition", key(1)) is None
    assert "damaged entry" in str(second.events.last_write_failure) and second.verify() == []


def test_the_bundle_of_one_entry_writes_no_other(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    attacker = Store(tmp_path / "attacker")
    put(attacker, 1)
    put(attacker, 2)
    bundle.export(attacker, tmp_path / "both.tar")
    store = RemoteStore(tmp_path / "second", url)
    place = tmp_path / "bucket" / "partition" / f"{key(1)}.tar"
    place.parent.mkdir(parents=True)
    place.write_bytes((tmp_path / "both.tar").read_bytes())
    assert store.get("partition", key(1)) is not None
    assert [entry.key for entry in store.entries()] == [key(1)] and store.verify() == []
    assert f"it is not partition {key(1)[:12]}" in str(store.events.last_write_failure)


def test_an_entry_that_is_larger_than_the_cache_is_not_fetched(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    put(RemoteStore(tmp_path / "first", url), 1)
    second = RemoteStore(tmp_path / "second", url, limit_bytes=100)
    assert second.get("partition", key(1)) is None and second.events.write_failures == 1
    assert "larger than cache.limit_gb allows" in str(second.events.last_write_failure)


def test_storage_that_fails_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bucket = tmp_path / "bucket"
    bucket.write_text("not a folder")
    store = RemoteStore(tmp_path / "first", f"file://{bucket}")
    put(store, 1)
    assert store.get("partition", key(1)) is not None and store.get("partition", key(2)) is None
    assert store.events.write_failures == 2
    assert "cannot be written" in caplog.text and "cannot be read" in caplog.text


def test_a_url_that_fsspec_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(CacheDirectoryError, match=r"pip install 'fsspec\[nowhere\]'"):
        RemoteStore(tmp_path, "nowhere://bucket")


def test_the_option_is_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = resolve_options({"model_caching": True, "cache_dir": "memory://bucket/cache"})
    assert options.options.cache_dir == "memory://bucket/cache"
    store = open_cache(options.options.cache_dir, CacheSettings())
    assert isinstance(store, RemoteStore) and tmp_path in store.root.parents
    assert not isinstance(open_cache(str(tmp_path / "plain"), CacheSettings()), RemoteStore)
    assert type(open_cache("memory://x", CacheSettings(directory=tmp_path / "packaging"))) is Store


@pytest.mark.slow
def test_a_second_machine_does_not_compile(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    counts = []
    for machine in ("first", "second"):
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / machine)}
        command = [sys.executable, "-c", WORKER, url]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        counts.append(done.stdout.splitlines()[-1])
    assert counts == ["[1, 1, 0]", "[1, 0, 1]"]


def test_a_wrong_entry_is_not_fetched_again_until_it_is_stored_anew(
    machines: tuple[RemoteStore, RemoteStore],
) -> None:
    first, second = machines
    put(first, 1)
    assert second.get("partition", key(1)) is not None
    second.discard("partition", key(1))
    assert second.get("partition", key(1)) is None
    put(second, 1)
    assert second.get("partition", key(1)) is not None
