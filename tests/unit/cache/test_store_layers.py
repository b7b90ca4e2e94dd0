import pytest
from cache_helpers import FILES, content, key, manifest, object_of, put

from torchserve_openvino.cache.storage.layers import Layers
from torchserve_openvino.cache.storage.store import DamagedEntryError, Store


@pytest.fixture
def folders(tmp_path):
    """Three folders with an entry each, whose bodies tell them apart."""
    stores = [Store(tmp_path / name) for name in ("primary", "first", "second")]
    for store in stores:
        put(store, 1, body={"from": store.root.name})
    return [store.root for store in stores]


@pytest.fixture
def layers(folders):
    primary, *extra = folders
    return Layers(Store(primary), [Store(folder, writable=False) for folder in extra])


def test_the_order(layers, folders):
    cache: Layers = layers
    for store, name in zip([layers.primary, *layers.extra], ["primary", "first", "second"], strict=True):
        assert cache.get("partition", key(1)).body == {"from": name}
        Store(store.root).clear()
    assert cache.get("partition", key(1)) is None
    assert (cache.events.hits, cache.events.misses) == (3, 1)


def test_a_damaged_layer_is_passed_over(layers, folders):
    manifest(layers.primary).write_bytes(b"damaged")
    object_of(layers.extra[0]).unlink()
    entry = layers.get("partition", key(1))
    assert entry.body == {"from": "second"} and content(entry) == FILES
    assert (layers.events.damaged, layers.events.hits, layers.events.misses) == (2, 1, 0)
    assert not manifest(layers.primary).exists() and manifest(layers.extra[0]).exists()


def test_damage_that_shows_only_when_read(layers):
    object_of(layers.primary).write_bytes(b"?" * 10240)
    with pytest.raises(DamagedEntryError):
        layers.get("partition", key(1)).read("model.bin")
    assert layers.get("partition", key(1)).body == {"from": "first"}


def test_put_goes_to_the_primary_and_wins(layers, folders):
    layers.discard("partition", key(1))
    assert layers.get("partition", key(1)) is None
    assert Store(folders[1]).get("partition", key(1)) is not None
    made = layers.put("partition", key(1), fields={}, body={"from": "new"}, files=FILES)
    assert layers.get("partition", key(1)) == made
    assert Store(folders[0]).get("partition", key(1)).body == {"from": "new"}
    assert layers.events.stored == 1
    with layers.lock("partition", key(1)) as held:
        assert held


def test_without_a_primary(folders):
    layers = Layers(None, [Store(folder, writable=False) for folder in folders[1:]])
    assert layers.get("partition", key(1)).body == {"from": "first"}
    assert layers.put("partition", key(2), fields={}, body={}) is None
    with layers.lock("partition", key(1)) as held:
        assert held is False
    assert layers.events.write_failures == 0
    empty = Layers(None)
    assert empty.get("call", key(1)) is None and empty.nearest("call", {}) is None and empty.events.misses == 1


def test_nearest_of_all(layers):
    Store(layers.extra[1].root).put("call", key(3), fields={"a": 1, "b": 2}, body={})
    layers.primary.put("call", key(4), fields={"a": 2, "b": 3}, body={})
    assert layers.nearest("call", {"a": 1, "b": 3}) == {"a": (2, 1)}
    assert layers.nearest("call", {"a": 1, "b": 5}) == {"b": (2, 5)}


def test_a_name_that_is_none(layers):
    with pytest.raises(ValueError):
        layers.get("call", "x")
