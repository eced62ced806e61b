"""What is made from tensors and other objects, kept and found again by the identity of what it was made from.

A tensor is the same as another one if both are the same view of the same memory and nothing was written to it
in between. Reading it would cost what the cache saves, and on a device a copy to the host, for which the device
has to be waited for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


class _Entry(NamedTuple):
    value: Any
    nbytes: int
    sources: list[Any]
    """Objects that are kept, and weak references to the storage of tensors."""

    @property
    def is_current(self) -> bool:
        """Whether all tensors exist: the address of one that doesn't may be another's."""
        return not any(isinstance(x, StorageWeakRef) and x.expired() for x in self.sources)


class IdentityCache(Generic[T]):
    """Values by key and sources, up to ``most`` bytes; the least recently used ones are dropped."""

    def __init__(self, most: int, nbytes: Callable[[T], int]):
        self.most, self._nbytes = most, nbytes
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, sources: Sequence[Any], make: Callable[[], T]) -> T:
        """The value of a key and of the objects that it is made from: made now unless it is kept.
        Tensors for which torch counts no versions (those of ``inference_mode``) are read in every call."""
        kept = [StorageWeakRef(x.untyped_storage()) if isinstance(x, Tensor) else x for x in sources]
        identity = [_identity(x, reference) for x, reference in zip(sources, kept)]
        if None in identity:
            return make()
        key = (key, *identity)
        with self._lock:
            found = self._entries.get(key)
            if found is not None and found.is_current:
                self._entries.move_to_end(key)
                return found.value
        value = make()
        with self._lock:
            self._entries[key] = _Entry(value, self._nbytes(value), kept)
            self._entries.move_to_end(key)
            for stale in [key for key, entry in self._entries.items() if not entry.is_current]:
                del self._entries[stale]
            total = sum(entry.nbytes for entry in self._entries.values())
            while total > self.most and len(self._entries) > 1:
                total -= self._entries.popitem(last=False)[1].nbytes
        return value

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


def _identity(x: Any, reference: Any) -> Hashable | None:
    """What two objects that are the same have in common; None where that is unknown."""
    if not isinstance(x, Tensor):
        return id(x)
    if x.is_inference():
        return None
    return reference.cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version
