"""Entries packaged in a model archive, which are searched after the store's own."""

from pathlib import Path

import pytest
from cache_helpers import FILES, content, key, manifest, object_of, put

from torchserve_openvino.cache.open import CacheSettings, open_cache
from torchserve_openvino.cache.storage.store import DamagedEntryError, Store
from torchserve_openvino.errors import CacheDirectoryError


@pytest.fixture
def packaged(tmp_path) -> Store:
    store = Store(tmp_path / "packaged")
    put(store, 1, body={"from": "packaged"})
    return store


@pytest.fixture
def store(tmp_path, packaged) -> Store:
    """A store with an entry under the same key, but with another body."""
    store = Store(tmp_path / "own", packaged=packaged.root)
    put(store, 1, body={"from": "own"})
    return store


def test_the_order(store, packaged):
    assert store.get("partition", key(1)).body == {"from": "own"}
    store.clear()
    assert store.get("partition", key(1)).body == {"from": "packaged"}
    packaged.clear()
    assert store.get("partition", key(1)) is None
    assert (store.events.hits, store.events.misses) == (2, 1)


def test_damage_is_passed_over_and_counted_on_both_levels(store, packaged):
    manifest(store).write_bytes(b"damaged")
    entry = store.get("partition", key(1))
    assert entry.body == {"from": "packaged"} and content(entry) == FILES
    object_of(packaged).unlink()
    assert store.get("partition", key(1)) is None
    assert (store.events.damaged, store.events.hits, store.events.misses) == (2, 1, 1)
    assert not manifest(store).exists() and manifest(packaged).exists()


def test_damage_that_shows_only_when_read(store):
    object_of(store).write_bytes(b"?" * 10240)
    with pytest.raises(DamagedEntryError):
        store.get("partition", key(1)).read("model.bin")
    assert store.get("partition", key(1)).body == {"from": "packaged"}


def test_packaged_entries_are_hidden_and_never_written(store, packaged):
    store.discard("partition", key(1))
    assert store.get("partition", key(1)) is None
    assert packaged.get("partition", key(1)) is not None
    made = store.put("partition", key(1), fields={}, body={"from": "new"}, files=FILES)
    assert store.get("partition", key(1)) == made and store.events.stored == 2
    assert packaged.get("partition", key(1)).body == {"from": "packaged"}
    with store.lock("partition", key(1)) as held:
        assert held
    assert not list(packaged.root.glob("locks/partition*"))


def test_nearest_of_both(store, packaged):
    packaged.put("call", key(3), fields={"a": 1, "b": 2}, body={})
    store.put("call", key(4), fields={"a": 2, "b": 3}, body={})
    assert store.nearest("call", {"a": 1, "b": 3}) == {"a": (2, 1)}
    assert store.nearest("call", {"a": 1, "b": 5}) == {"b": (2, 5)}


def test_a_link_in_the_packaged_folder_is_refused(tmp_path, packaged):
    (packaged.root / "objects" / "ab").symlink_to(tmp_path)
    with pytest.raises(CacheDirectoryError, match="is a link"):
        Store(tmp_path / "own", packaged=packaged.root)


def test_what_is_opened(tmp_path, packaged):
    assert open_cache(None, CacheSettings()) is None
    assert open_cache(None, CacheSettings(packaged=Path("absent"))) is None
    both = open_cache(str(tmp_path / "own"), CacheSettings(packaged=packaged.root))
    assert (both.root, both.packaged, both.read_only) == (tmp_path / "own", packaged.root, False)
    alone = open_cache(None, CacheSettings(packaged=packaged.root))
    assert (alone.root, alone.packaged, alone.read_only) == (packaged.root, None, True)
    assert alone.get("partition", key(1)).body == {"from": "packaged"}
    assert alone.put("partition", key(2), fields={}, body={}) is None and alone.events.write_failures == 0
    with alone.lock("partition", key(1)) as held:
        assert held is False
    alone.discard("partition", key(1))
    assert alone.get("partition", key(1)) is None and manifest(packaged).exists()
