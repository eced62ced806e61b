"""An attention as calls over device tensors: block lists and the numbers of masks, made once.

Layouts are compiled on the host. What kernels read of them lies on the device: block lists, the numbers and
tables of a mask, indices of gathered tokens. Making these takes milliseconds and, where lengths, padding or
offsets come as tensors of the device, a copy to the host, for which the device has to be waited for. So calls
are kept per device, up to ``CACHE_BYTES`` of lists, and found again by the identity and the version of the
tensors that they were made from: a tensor that is the same object and was not written to since is not read.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from longspan import _mask_mod
from longspan._longspan import DeviceCall, DevicePart
from longspan.torch._views import Selection

#: Bytes of lists and tables that are kept per device.
CACHE_BYTES = 256 << 20

#: Bytes of a call's lists from which wide rows and columns are calls of their own; None for the default of
#: ``DeviceCall.parts``.
LONG_LISTS: int | None = None


class Call(NamedTuple):
    """One call of a kernel."""

    queries: Selection
    keys: Selection
    whole: bool
    """Whether it has all tokens and heads of the tensors, in order."""
    source: str
    """Of its mask: calls of one source share a compiled kernel."""
    numbers: Tensor
    tables: tuple[Tensor, ...]
    lists: tuple[Tensor, ...]
    """The eight block lists of a ``BlockMask``, ``[entry, head, line, …]``."""
    block: int

    @property
    def nbytes(self) -> int:
        indices = (self.queries.chosen, self.keys.chosen)
        tensors = (*self.lists, self.numbers, *self.tables, *indices)
        return sum(x.nbytes for x in tensors if isinstance(x, Tensor))


def prepared(calls: Sequence[DeviceCall], device: torch.device) -> list[Call]:
    """Calls with their lists and numbers on a device."""
    return [_call(call, part, device) for call in calls for part in call.parts(LONG_LISTS)]


def _call(call: DeviceCall, part: DevicePart, device: torch.device) -> Call:
    program = _mask_mod.program(call.masks, part.query_tokens, part.key_tokens)
    chosen = [
        x if x is None or isinstance(x, tuple) else on_device(x, device)
        for x in (part.query_tokens, part.key_tokens)
    ]
    return Call(
        Selection(call.entry, *call.queries, chosen[0]),
        Selection(call.entry, *call.keys, chosen[1]),
        call.whole and chosen == [None, None],
        program.source,
        on_device(program.numbers, device),
        tuple(on_device(table, device) for table in program.tables),
        tuple(on_device(numbers, device) for numbers in _of_decode(part.lists)),
        call.block,
    )


def _of_decode(lists: Sequence[Any]) -> list[Any]:
    """Lists whose Partial and Full blocks have as much room, where there is one row of query blocks: torch's decode
    kernel finds both by the sizes of the first."""
    _, partial, _, full, *_ = lists
    if partial.shape[2] > 2 or partial.shape == full.shape:
        return list(lists)
    width = max(partial.shape[3], full.shape[3])
    padded = list(lists)
    for place in (1, 3):
        room = width - lists[place].shape[3]
        padded[place] = numpy.pad(lists[place], ((0, 0), (0, 0), (0, 0), (0, room)))
    return padded


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """An array as a tensor of a device. The copy to a GPU is from pinned memory, so that the host does not
    wait for it."""
    x = torch.from_numpy(numbers)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class _Entry(NamedTuple):
    objects: list[Callable[[], Any]]
    """What the calls were made from; None for a tensor that is gone."""
    calls: list[Call]
    nbytes: int


class CallCache:
    """Calls by what they were made from."""

    def __init__(self, most: int = CACHE_BYTES):
        self.most = most
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, key: Hashable, made_from: Sequence[Any], make: Callable[[], list[Call]]
    ) -> list[Call]:
        """The calls of a key and of the objects that they are made from, which are compared by identity;
        tensors by version, too."""
        versions = [_version(x) for x in made_from]
        if None in versions:
            return make()
        key = (key, tuple(map(id, made_from)), tuple(versions))
        with self._lock:
            found = self._entries.get(key)
            # Another object may have got the address of one that is gone.
            if found is not None and all(get() is x for get, x in zip(found.objects, made_from)):
                self._entries.move_to_end(key)
                return found.calls
        calls = make()
        size = sum(call.nbytes for call in calls)
        with self._lock:
            self._entries[key] = _Entry([_reference(x) for x in made_from], calls, size)
            self._entries.move_to_end(key)
            total = sum(entry.nbytes for entry in self._entries.values())
            while total > self.most and len(self._entries) > 1:
                total -= self._entries.popitem(last=False)[1].nbytes
        return calls

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


def _reference(x: Any) -> Callable[[], Any]:
    return weakref.ref(x) if isinstance(x, Tensor) else lambda: x


def _version(x: Any) -> int | None:
    """How often a tensor was written to; None where torch does not count."""
    if not isinstance(x, Tensor):
        return 0
    return None if x.is_inference() else x._version
