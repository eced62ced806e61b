"""An attention as calls over device tensors: block lists and the numbers of masks, made once.

Layouts are compiled on the host. What kernels read of them lies on the device: block lists, the numbers and
tables of a mask, indices of gathered tokens. Making these takes milliseconds and, where lengths, padding or
offsets come as tensors of the device, a copy to the host, for which the device has to be waited for. So calls
are kept per device, up to ``CACHE_BYTES`` of lists, and found again by the identity of what they were made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from longspan import _mask_mod
from longspan._longspan import DeviceCall, DevicePart
from longspan.torch._identity_cache import IdentityCache
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


def call_cache() -> IdentityCache[list[Call]]:
    """Calls on one device by what they were made from."""
    return IdentityCache(CACHE_BYTES, lambda calls: sum(call.nbytes for call in calls))
