"""The exported model as an artifact: a warm start traces, converts and runs nothing in eager PyTorch."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from engines import OFF, answers, opened

from language_models import greedy, prompts, saved
from torchserve_openvino.cache.identity.key import make_key
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.generation.text import making
from torchserve_openvino.generation.text.engine import Sampling
from torchserve_openvino.generation.text.engine_settings import end_tokens
from torchserve_openvino.generation.text.exporting.artifact import KIND, fields_of, folder_digest

pytest.importorskip("transformers")
pytest.importorskip("openvino_genai")


@pytest.fixture
def folder(served: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(served("llama").folder, tmp_path / "model"))


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


@pytest.mark.slow
def test_a_warm_start_makes_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "cache")
    cold = opened_and_closed(folder, store)
    assert sources(cold) == (False, False)
    forbid(monkeypatch, "export", "expect", "nearness", "load_model", "load_config", "compressed")
    warm = opened_and_closed(folder, store)
    assert sources(warm) == (True, True)
    # What passed before is compared again in part.
    assert cold["tokens_compared_at_start"] == 4 * 24 and warm["tokens_compared_at_start"] == 4 * 4
    varying = {"model_from_cache", "proof_from_cache", "process", "seconds", "tokens_compared_at_start"}
    assert {k: v for k, v in warm.items() if k not in varying} == {k: v for k, v in cold.items() if k not in varying}


@pytest.mark.slow
def test_other_weights_are_another_model(folder: Path, filled: Store) -> None:
    model = saved(folder, "llama", rms_norm_eps=1e-3)
    found = opened(folder, filled)
    assert sources(found.facts) == (False, False)
    (prompt,) = prompts(9)
    assert answers(found.engine, [prompt], Sampling(8, ignore_eos=True)) == [[greedy(model, prompt, 8)]]
    found.engine.close()


@pytest.mark.slow
def test_settings_that_do_not_matter_to_the_model(folder: Path, filled: Store) -> None:
    assert sources(opened_and_closed(folder, filled, threads=2, max_waiting=3)) == (True, True)
    assert sources(opened_and_closed(folder, filled, kv_cache="u8")) == (True, False)
    assert sources(opened_and_closed(folder, filled, proof_tokens=7)) == (True, False)
    assert sources(opened_and_closed(folder, filled, verify=OFF)) == (True, False)


@pytest.mark.slow
def test_another_engine_is_proven_in_full(folder: Path, filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(**given: Any) -> int:
        return int(opened_and_closed(folder, filled, **given)["tokens_compared_at_start"])

    assert compared() == 16
    for given in ({"step_tokens": 64}, {"prefix_caching": False}, {"verify": {"min_cosine": 0.5}}):
        assert (compared(**given), compared(**given)) == (96, 16)
    monkeypatch.setattr(making, "source_digest", lambda *rooms: "changed")
    assert compared() == 96


@pytest.mark.slow
def test_a_stored_proof_that_cannot_be_read_is_made_again(folder: Path, filled: Store) -> None:
    for entry in list(filled.entries()):
        if entry.kind == "verdict":
            filled.put("verdict", entry.key, fields=entry.fields, body={"problems": []})
    assert opened_and_closed(folder, filled)["tokens_compared_at_start"] == 96


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.xml", pytest.param("model.bin", marks=pytest.mark.slow)])
def test_a_damaged_file_means_a_new_export(folder: Path, filled: Store, name: str) -> None:
    key = make_key(KIND, fields_of(folder_digest(folder), GenerateSection()))
    entry = filled.load(KIND, key)
    path = entry.path(name)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    found = opened_and_closed(folder, Store(filled.root))
    assert found["model_from_cache"] is False and found["passed"]
    assert sources(opened_and_closed(folder, Store(filled.root))) == (True, True)


@pytest.mark.slow
def test_a_packaged_model_is_used(folder: Path, filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, "export", "expect", "nearness", "load_model")
    packaged = Store(tmp_path / "own", packaged=filled.root)
    assert sources(opened_and_closed(folder, packaged)) == (True, True)
    assert not list(packaged.entries())


@pytest.mark.slow
def test_without_a_cache_nothing_is_left(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    assert sources(opened_and_closed(folder, None)) == (False, False)
    assert not list(place.iterdir())


@pytest.mark.slow
def test_the_model_survives_its_entry(folder: Path, filled: Store, served: Any) -> None:
    """Another process may evict the entry while the engine runs; its files are mapped."""
    found = opened(folder, filled)
    filled.clear()
    (prompt,) = prompts(9)
    got = answers(found.engine, [prompt], Sampling(8, ignore_eos=True))
    found.engine.close()
    assert got == [[greedy(served("llama").model, prompt, 8)]]


def test_ends_are_read_from_the_folder(folder: Path) -> None:
    assert end_tokens(folder) == {2}
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert end_tokens(folder) == {2, 7}
    path.write_text(json.dumps({}))
    assert end_tokens(folder) == {2}, "config.json"
