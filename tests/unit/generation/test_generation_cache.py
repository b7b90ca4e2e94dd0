"""The exported model as an artifact: a warm start traces, converts and runs nothing in eager PyTorch."""

import json
from pathlib import Path
from typing import Any

import pytest
from engines import answers, opened

from language_models import greedy, prompts, saved
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.generation.text import making
from torchserve_openvino.generation.text.engine import Sampling

pytest.importorskip("transformers")
pytest.importorskip("openvino_genai")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    saved(made, "llama")
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def opened_and_closed(folder: Path, store: Store | None, **given: Any) -> dict[str, Any]:
    found = opened(folder, store, **given)
    found.engine.close()
    return found.facts


def sources(facts: dict[str, Any]) -> tuple[bool, bool]:
    return facts["model_from_cache"], facts["proof_from_cache"]


def forbid(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("must not run")

    for name in names:
        monkeypatch.setattr(making, name, refuse)


def test_a_warm_start_makes_nothing(folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = opened_and_closed(folder, store)
    assert sources(cold) == (False, False)
    forbid(monkeypatch, "export", "expect", "nearness", "load_model", "compressed")
    warm = opened_and_closed(folder, store)
    assert sources(warm) == (True, True)
    varying = {"model_from_cache", "proof_from_cache", "seconds"}
    assert {k: v for k, v in warm.items() if k not in varying} == {k: v for k, v in cold.items() if k not in varying}


def test_other_weights_are_another_model(folder: Path, store: Store) -> None:
    opened_and_closed(folder, store)
    model = saved(folder, "llama", rms_norm_eps=1e-3)
    found = opened(folder, store)
    assert sources(found.facts) == (False, False)
    (prompt,) = prompts(9)
    assert answers(found.engine, [prompt], Sampling(8, ignore_eos=True)) == [[greedy(model, prompt, 8)]]
    found.engine.close()


def test_settings_that_do_not_matter_to_the_model(folder: Path, store: Store) -> None:
    opened_and_closed(folder, store)
    assert sources(opened_and_closed(folder, store, threads=2, max_waiting=3)) == (True, True)
    assert sources(opened_and_closed(folder, store, kv_cache="u8")) == (True, False)
    assert sources(opened_and_closed(folder, store, proof_tokens=7)) == (True, False)
    assert sources(opened_and_closed(folder, store, verify={"against": "off"})) == (True, False)


@pytest.mark.parametrize("name", ["model.xml", "model.bin"])
def test_a_damaged_file_means_a_new_export(folder: Path, store: Store, name: str) -> None:
    opened_and_closed(folder, store)
    (entry,) = store.entries(("generator",))
    path = entry.path(name)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    found = opened_and_closed(folder, Store(store.root))
    assert found["model_from_cache"] is False and found["passed"]
    assert sources(opened_and_closed(folder, Store(store.root))) == (True, True)


def test_a_packaged_model_is_used(folder: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened_and_closed(folder, store)
    forbid(monkeypatch, "export", "expect", "nearness", "load_model")
    packaged = Store(tmp_path / "own", packaged=store.root)
    assert sources(opened_and_closed(folder, packaged)) == (True, True)
    assert not list(packaged.entries())


def test_without_a_cache_nothing_is_left(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    assert sources(opened_and_closed(folder, None)) == (False, False)
    assert not list(place.iterdir())


def test_the_model_survives_its_entry(folder: Path, store: Store) -> None:
    """Another process may evict the entry while the engine runs; its files are mapped."""
    opened_and_closed(folder, store)
    found = opened(folder, store)
    store.clear()
    (prompt,) = prompts(9)
    got = answers(found.engine, [prompt], Sampling(8, ignore_eos=True))
    found.engine.close()
    again = opened(folder, None)
    assert answers(again.engine, [prompt], Sampling(8, ignore_eos=True)) == got
    again.engine.close()


def test_ends_are_read_from_the_folder(folder: Path) -> None:
    from torchserve_openvino.generation.text.settings import end_tokens

    assert end_tokens(folder) == {2}
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert end_tokens(folder) == {2, 7}
    path.write_text(json.dumps({}))
    assert end_tokens(folder) == {2}, "config.json"
