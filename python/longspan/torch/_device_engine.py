"""An engine outside of Longspan: attention as calls of its kernels over views of tensors, joined here.

A call computes ``(out, lse)`` over some tokens and heads, from block lists and a mask; ``attend`` and
``differentiate`` are what an engine has to do. One call over everything is the result. Several (components in
orders of residues, branches, wide columns, hops of a ring) continue one softmax state per row in f32, and each
call's gradients, given the final statistics of its rows, are added in f32.

An engine that returns partial results in the type of its inputs rounds once per call, not once per row.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import longspan
from longspan._longspan import device_calls
from longspan.torch import _run
from longspan.torch._call_cache import Call, call_cache, prepared
from longspan.torch._engine import BLOCK
from longspan.torch._identity_cache import IdentityCache
from longspan.torch._partials import Partial, add_rows, sink_gradient
from longspan.torch._run import Found, Places, Scores
from longspan.torch._views import dense_like, gather, within_32_bits


class DeviceEngine(abc.ABC):
    """Attention by kernels that read block lists."""

    name: str

    def __init__(self) -> None:
        self._caches: dict[torch.device, IdentityCache[list[Call]]] = {}

    # --- What a kernel does.

    @abc.abstractmethod
    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Refuses by name tensors that the engine can't compute on."""

    @abc.abstractmethod
    def attend(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, scores: Scores, saves: bool
    ) -> tuple[Tensor, Tensor]:
        """``out`` and ``lse`` (f64, natural logarithm) of the tokens and heads of a call; ``saves`` where a backward
        pass may follow."""

    @abc.abstractmethod
    def differentiate(
        self,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: tuple[Tensor, Tensor, Tensor, Tensor | None],
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv`` of a call, from the final ``out, lse, dout, dlse`` of its rows; ``lse`` in f64."""

    # --- What front ends call.

    def empty(self, q: Tensor, v: Tensor, saves: bool) -> Found:
        """Room for results, as ``forward`` returns them; also of tensors that hold nothing."""
        out = dense_like(q, (*q.shape[:3], v.shape[3]))
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        return Found(out, lse, torch.empty_like(lse) if saves else None)

    def empty_gradient(self, x: Tensor) -> Tensor:
        """Room for a gradient, as ``backward`` returns it."""
        return dense_like(x, tuple(x.shape))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        what: Any,
        scores: Scores,
        places: Places,
        saves: bool,
    ) -> Found:
        """Attention over a pattern, its text, a layout or a ``Dilated``."""
        self.check(q, k, v)
        check_shapes(q, k, v)
        q, k, v, scores = (*(x.detach() for x in (q, k, v)), _detached(scores))
        calls = self.calls(q, k, v, what, places)
        found = self.empty(q, v, saves)
        with torch.no_grad():
            state = self.state(q, k, v, calls, scores, saves)
            if scores.sink_logits is not None:
                state = Partial(state.out.float(), state.lse).with_sinks(scores.sink_logits)
                _exclude(state.lse, what, places, k.shape[2])
            out = state.out
            if out.dtype != q.dtype or out.stride() != found.out.stride():
                out = found.out.copy_(out)
            lse, lse_lo = state.rounded_lse()
        return Found(out, lse, lse_lo if saves else None)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        found: Found,
        dout: Tensor | None,
        dlse: Tensor | None,
        what: Any,
        scores: Scores,
        places: Places,
        wanted: Sequence[bool] = (True, True, True),
    ) -> tuple[Tensor, ...]:
        """Gradients of ``q``, ``k`` and ``v``, and those of sink logits, bias table and slopes: without elements
        where there are none."""
        sinks = scores.sink_logits
        q, k, v, scores = (*(x.detach() for x in (q, k, v)), _detached(scores))
        calls = self.calls(q, k, v, what, places)
        lse = found.lse.double() + found.lse_lo
        rows = (found.out, lse, torch.zeros_like(found.out) if dout is None else dout, dlse)
        with torch.no_grad():
            gradients = self.gradients(q, k, v, calls, rows, scores)
            exact = []
            for x, gradient in zip((q, k, v), gradients):
                into = self.empty_gradient(x)
                same = gradient.dtype == x.dtype and gradient.stride() == into.stride()
                exact.append(gradient if same else into.copy_(gradient))
            learned = [found.lse.new_empty((0,))] * 3
            if sinks is not None and wanted[0]:
                learned[0] = sink_gradient(sinks, found.out, lse, dout, dlse)
        return (*exact, *learned)

    # --- Calls and their joint results; a ring has its own calls.

    def calls(self, q: Tensor, k: Tensor, v: Tensor, what: Any, places: Places) -> list[Call]:
        """The calls of an attention, kept for as long as lengths and places stay what they are."""
        known = [_number(x) for x in places]
        numbers = (x if isinstance(x, int) else None for x in known)
        made_from = [x for x in known if isinstance(x, Tensor)]
        # Layouts are compared by identity: comparing their pairs may take longer than attention does.
        is_layout = isinstance(what, longspan.Layout)
        key = (*q.shape[:3], *k.shape[1:3], None if is_layout else what, *numbers)
        if is_layout:
            made_from.append(what)

        def make() -> list[Call]:
            sizes = (q.shape[0], q.shape[1], k.shape[1])
            lengths = (q.shape[2], k.shape[2])
            return prepared(_device_calls(what, places.on_host(), k, sizes, lengths), q.device)

        return self.cache(q.device).get(key, made_from, make)

    def cache(self, device: torch.device) -> IdentityCache[list[Call]]:
        return self._caches.setdefault(device, call_cache())

    def state(
        self, q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Call], scores: Scores, saves: bool
    ) -> Partial:
        """The softmax of all calls; of a single one over everything in the type of the inputs, otherwise f32."""
        if len(calls) == 1 and calls[0].whole:
            (call,) = calls
            return Partial(*self.attend(call, *_fitting(q, k, v), scores, saves))
        out = dense_like(q, (*q.shape[:3], v.shape[3]), torch.float32).zero_()
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64, device=q.device)
        state = Partial(out, lse)
        self.extend(state, q, k, v, calls, scores, saves)
        return state

    def extend(
        self,
        state: Partial,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        calls: Sequence[Call],
        scores: Scores,
        saves: bool,
    ) -> None:
        """Continues the state of all queries with the keys of some calls."""
        for call in calls:
            tensors = (gather(q, call.queries), gather(k, call.keys), gather(v, call.keys))
            some = _of_heads(scores, call)
            found = Partial(*self.attend(call, *_fitting(*tensors), some, saves))
            state.merge(found, call.queries)

    def gradients(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        calls: Sequence[Call],
        rows: tuple[Tensor, Tensor, Tensor, Tensor | None],
        scores: Scores,
    ) -> tuple[Tensor, ...]:
        """Gradients of all calls; of a single one over everything in the type of the inputs, otherwise f32."""
        if len(calls) == 1 and calls[0].whole:
            (call,) = calls
            return self.differentiate(call, *_fitting(q, k, v), _fitting_rows(rows), scores)
        sums = tuple(dense_like(x, tuple(x.shape), torch.float32).zero_() for x in (q, k, v))
        self.accumulate(sums, q, k, v, calls, rows, scores)
        return sums

    def accumulate(
        self,
        sums: tuple[Tensor, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        calls: Sequence[Call],
        rows: tuple[Tensor, Tensor, Tensor, Tensor | None],
        scores: Scores,
    ) -> None:
        """Adds the gradients of some calls to ``dq, dk, dv``."""
        for call in calls:
            tensors = (gather(q, call.queries), gather(k, call.keys), gather(v, call.keys))
            own = tuple(
                None if x is None else gather(x if x.ndim == 4 else x[..., None], call.queries)
                for x in rows
            )
            out, lse, dout, dlse = own
            own = (out, lse[..., 0], dout, None if dlse is None else dlse[..., 0])
            found = self.differentiate(
                call, *_fitting(*tensors), _fitting_rows(own), _of_heads(scores, call)
            )
            for into, part, selection in zip(sums, found, (call.queries, call.keys, call.keys)):
                add_rows(into, part, selection)


def _device_calls(
    what: Any, places: Places, k: Tensor, sizes: tuple[int, int, int], lengths: tuple[int, int]
) -> list[Any]:
    """The calls of a pattern, a layout or branches, whose places are on the host."""
    what = _run.with_places(what, places, k)
    if isinstance(what, longspan.Layout):
        return device_calls(what, *sizes)
    options = _run.placement(places, k)
    if isinstance(what, longspan.Dilated):
        offset = options.get("query_offset")
        if options.get("key_padding") is not None:
            what = what.padded(options["key_padding"])
        return device_calls(what, *sizes, *lengths, query_offset=offset, block=BLOCK)
    return device_calls(what.compile(*lengths, block=BLOCK, **options), *sizes)


def _number(place: int | Tensor | None) -> int | Tensor | None:
    """An offset that the host knows, as a number: operators take tensors, which are made anew for each call."""
    known = isinstance(place, Tensor) and place.ndim == 0 and place.device.type == "cpu"
    return int(place.item()) if known else place


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses tensors that don't fit each other."""
    for name, x, axis, expected, why in (
        ("k", k, 0, q.shape[0], "batch entries"),
        ("v", v, 0, q.shape[0], "batch entries"),
        ("v", v, 1, k.shape[1], "heads"),
        ("v", v, 2, k.shape[2], "tokens"),
        ("k", k, 3, q.shape[3], "elements per head"),
    ):
        if x.shape[axis] != expected:
            other = "q" if axis in (0, 3) else "k"
            raise ValueError(f"{name} has {x.shape[axis]} {why}, expected {expected}, as {other}")
    heads, key_heads = q.shape[1], k.shape[1]
    if (heads % key_heads if key_heads else heads) != 0:
        raise ValueError(
            f"q has {heads} heads and k has {key_heads}, expected a multiple of the heads of k"
        )


def _detached(scores: Scores) -> Scores:
    learned = (None if x is None else x.detach() for x in scores.learned)
    return scores._replace(**dict(zip(scores.learned._fields, learned)))


def _of_heads(scores: Scores, call: Call) -> Scores:
    """Slopes and tables of the heads of a call."""
    first, step, count = call.queries.heads

    def some(x: Tensor | None) -> Tensor | None:
        if x is None or (first, step, count) == (0, 1, x.shape[0]):
            return x
        return x[first : first + step * count : step].contiguous()

    return scores._replace(
        bias_table=some(scores.bias_table), alibi_slopes=some(scores.alibi_slopes)
    )


def _fitting(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return within_32_bits("q", q), within_32_bits("k", k), within_32_bits("v", v)


def _fitting_rows(
    rows: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    out, lse, dout, dlse = rows
    # Kernels index statistics of rows without strides.
    dlse = None if dlse is None else dlse.contiguous()
    return within_32_bits("out", out), lse.contiguous(), within_32_bits("dout", dout), dlse


def _exclude(lse: Tensor, what: Any, places: Places, keys: int) -> None:
    """Sets the log-sum-exp of queries outside of padded sequences to −∞: branches have no row there, so no
    sink either."""
    padding = places.key_padding
    if padding is None or not isinstance(what, longspan.Dilated):
        return
    padding = padding.to(lse.device, non_blocking=True)
    if padding.dtype == torch.bool:
        first, end = _run.range_of_mask(padding)
    else:
        first, end = padding.unbind(1)
    offset = keys - lse.shape[2] if places.query_offset is None else places.query_offset
    positions = torch.arange(lse.shape[2], device=lse.device) + offset
    outside = (positions < first[:, None]) | (positions >= end[:, None])
    lse.masked_fill_(outside[:, None], -torch.inf)
