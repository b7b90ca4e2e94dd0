"""Several stores as one: what this machine made itself, and what came along with a model archive."""

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torchserve_openvino.cache.storage.events import Events, total
from torchserve_openvino.cache.storage.manifest import Entry, Kind, check_name
from torchserve_openvino.cache.storage.objects import Source
from torchserve_openvino.cache.storage.store import Store


class Layers:
    """A primary store that is written, and others that are only read.

    Args:
        primary: Where entries are looked for first and stored; None to store nothing.
        extra: Where they are looked for next, in this order.
    """

    def __init__(self, primary: Store | None, extra: Sequence[Store] = ()) -> None:
        self.primary = primary
        self.extra = tuple(extra)
        self._stores = (*([primary] if primary is not None else []), *self.extra)
        self._looked = Events()

    @property
    def events(self) -> Events:
        """Counts of all stores as they are now; one `get` counts as one hit or one miss."""
        counts = total(store.events for store in self._stores)
        looked = self._looked.to_dict()
        counts.hits, counts.misses = looked["hits"], looked["misses"]
        return counts

    def get(self, kind: Kind | str, key: str) -> Entry | None:
        """The first store's entry that is not damaged. Raises as `Store.get`."""
        check_name(kind, key)
        found = (entry for store in self._stores if (entry := store.get(kind, key)) is not None)
        entry = next(found, None)
        self._looked.add("misses" if entry is None else "hits")
        return entry

    def put(
        self,
        kind: Kind | str,
        key: str,
        *,
        fields: Mapping[str, Any],
        body: Mapping[str, Any],
        files: Mapping[str, Source] | None = None,
    ) -> Entry | None:
        """Stores in the primary store; None where there is none. Otherwise as `Store.put`."""
        if self.primary is None:
            return None
        return self.primary.put(kind, key, fields=fields, body=body, files=files)

    def discard(self, kind: Kind | str, key: str) -> None:
        """Drops an entry from the primary store, and hides it in those that are only read."""
        for store in self._stores:
            store.discard(kind, key)

    def lock(self, kind: Kind | str, key: str) -> AbstractContextManager[bool]:
        """The primary store's lock; False where there is none."""
        return contextlib.nullcontext(False) if self.primary is None else self.primary.lock(kind, key)

    def nearest(self, kind: Kind | str, fields: Mapping[str, Any]) -> dict[str, tuple[Any, Any]] | None:
        """The nearest of all stores; of several as near as each other, the first store's."""
        found = [near for store in self._stores if (near := store.nearest(kind, fields)) is not None]
        return min(found, key=len, default=None)
