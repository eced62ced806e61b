"""What one rank sends and computes in a pass of a ring whose tensors are on a device.

Messages hold what those of rings on the CPU do, ``[batch, head, token, dim]`` of some heads and tokens: keys,
then values; gradients in f32. A partial softmax of a query that was sent to another rank returns as its
log-sum-exp rounded to f32, ``exp`` of what rounding left out, and its output: in the places of the maximum, the sum
of weights and the weighted sum of values.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from longspan._longspan import RingSchedule
from longspan.torch._call_cache import Call, prepared
from longspan.torch._partials import Partial
from longspan.torch._run import Scores
from longspan.torch._views import Selection, dense_like

if TYPE_CHECKING:
    from longspan.torch._device_engine import DeviceEngine

#: ``(payload, index, child, leg, bytes)``.
Part = tuple[str, int, "int | None", str, int]
#: Final ``out, lse, dout, dlse``; ``lse`` in f64.
Rows = tuple[Tensor, Tensor, Tensor, "Tensor | None"]


class Selected(NamedTuple):
    """Some heads and tokens of ``(batch, head, token, …)``."""

    heads: Tensor
    tokens: Tensor

    def of(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.heads).index_select(2, self.tokens)

    def add(self, into: Tensor, part: Tensor) -> None:
        into[:, self.heads[:, None], self.tokens] += part


class ReceivedKeys(NamedTuple):
    """Keys and values of another rank, of some heads."""

    heads: int
    tokens: int
    queries: Tensor | None
    """The local queries that attend to them, or None for all."""
    calls: list[Call]
    uses: int
    """Here, and by children in a broadcast tree."""


class RemoteQueries(NamedTuple):
    """Queries of another rank, of some heads."""

    heads: Tensor
    tokens: int
    calls: list[Call]


class RankPlan(NamedTuple):
    """What a rank sends, receives and computes in both passes, by the indices of parts."""

    engine: DeviceEngine
    local_keys: list[tuple[int, int, list[Call]]]
    sent_keys: list[Selected]
    received_keys: list[ReceivedKeys]
    sent_queries: list[Selected]
    remote_queries: list[RemoteQueries]


def rank_plan(schedule: RingSchedule, engine: DeviceEngine, device: torch.device) -> RankPlan:
    """A schedule with its calls and indices on a device."""

    def indices(progressions: Sequence[tuple[int, int, int]]) -> Tensor:
        parts = [torch.arange(count) * step + first for first, step, count in progressions]
        return torch.cat(parts).to(device)

    def sent(rows: Sequence[tuple[list[int], list[tuple[int, int, int]]]]) -> list[Selected]:
        return [Selected(torch.tensor(heads).to(device), indices(some)) for heads, some in rows]

    local = [(first, count, prepared(calls, device)) for first, count, calls in schedule.local_keys]
    received = [
        ReceivedKeys(
            len(heads),
            tokens,
            None if queries is None else indices(queries),
            prepared(calls, device),
            1 + children,
        )
        for heads, tokens, queries, calls, children in schedule.received_keys
    ]
    remote = [
        RemoteQueries(torch.tensor(heads).to(device), tokens, prepared(calls, device))
        for heads, tokens, calls in schedule.remote_queries
    ]
    sent_keys, sent_queries = sent(schedule.sent_keys), sent(schedule.sent_queries)
    return RankPlan(engine, local, sent_keys, received, sent_queries, remote)


class Pass(abc.ABC):
    """What one pass sends and computes. Tensors of messages are bytes."""

    def __init__(self, plan: RankPlan, q: Tensor, k: Tensor, v: Tensor, scores: Scores):
        self.plan, self.q, self.k, self.v, self.scores = plan, q, k, v, scores
        self._keys: dict[int, tuple[Tensor, int]] = {}
        """Received keys, and how often they are needed."""

    def room(self, part: Part) -> Tensor:
        """Memory to receive a part into."""
        return torch.empty(part[4], dtype=torch.uint8, device=self.q.device)

    def send(self, part: Part) -> Tensor:
        """A part to send."""
        match part:
            case ("sent_keys", index, _, "outbound", _):
                rows = self.plan.sent_keys[index]
                return _packed(rows.of(self.k), rows.of(self.v))
            case ("forwarded_keys", index, _, "outbound", _):
                return self._use(index)
        return self.own_send(part)

    def keep(self, part: Part, received: Tensor) -> None:
        """Takes a part that was received."""
        match part:
            case ("received_keys", index, _, "outbound", _):
                self._keys[index] = received, self.plan.received_keys[index].uses
            case _:
                self.own_keep(part, received)

    @abc.abstractmethod
    def own_send(self, part: Part) -> Tensor: ...

    @abc.abstractmethod
    def own_keep(self, part: Part, received: Tensor) -> None: ...

    @abc.abstractmethod
    def compute(self, part: Part) -> None: ...

    def local(self, index: int) -> tuple[slice, list[Call]]:
        first, count, calls = self.plan.local_keys[index]
        return slice(first, first + count), calls

    def received(self, index: int) -> tuple[ReceivedKeys, Tensor, Tensor]:
        """Received keys and values."""
        keys = self.plan.received_keys[index]
        shape = (self.q.shape[0], keys.heads, keys.tokens)
        k, v = _unpacked(
            self._use(index), (shape, self.k.shape[3], self.k.dtype), (shape, self.v.shape[3], self.v.dtype)
        )
        return keys, k, v

    def _use(self, index: int) -> Tensor:
        """The bytes of received keys, which are let go after their last use."""
        tensor, uses = self._keys.pop(index)
        if uses > 1:
            self._keys[index] = tensor, uses - 1
        return tensor

    def spread(self, some: Tensor, heads: Tensor, empty: float = 0.0) -> Tensor:
        """Rows of some query heads among those of all."""
        batch, _, *rest = some.shape
        everything = some.new_full((batch, self.q.shape[1], *rest), empty)
        everything[:, heads] = some
        return everything


class Forward(Pass):
    """Partial softmaxes over local and received keys, joined."""

    def __init__(
        self, plan: RankPlan, q: Tensor, k: Tensor, v: Tensor, scores: Scores, saves: bool
    ):
        super().__init__(plan, q, k, v, scores)
        self._saves = saves
        self.state = self._empty(q.shape[2])
        self._remote: dict[int, Tensor] = {}
        self._results: dict[int, Tensor] = {}
        self._returned: dict[int, Tensor] = {}

    def _empty(self, tokens: int) -> Partial:
        batch, heads, _, _ = self.q.shape
        out = dense_like(self.q, (batch, heads, tokens, self.v.shape[3]), torch.float32).zero_()
        lse = torch.full(out.shape[:3], -torch.inf, dtype=torch.float64, device=self.q.device)
        return Partial(out, lse)

    def own_send(self, part):
        match part:
            case ("sent_queries", index, _, "outbound", _):
                return _packed(self.plan.sent_queries[index].of(self.q))
            case ("remote_queries", index, _, "return", _):
                return self._results.pop(index)
        raise AssertionError(part)

    def own_keep(self, part, received):
        match part:
            case ("remote_queries", index, _, "outbound", _):
                self._remote[index] = received
            case ("sent_queries", index, _, "return", _):
                self._returned[index] = received
            case _:
                raise AssertionError(part)

    def compute(self, part):
        match part[0]:
            case "local_keys":
                some, calls = self.local(part[1])
                self._extend(self.state, self.q, self.k[:, :, some], self.v[:, :, some], calls)
            case "received_keys":
                self._attend_received_keys(part[1])
            case "remote_queries":
                self._attend_remote_queries(part[1])
            case "sent_queries":
                self._merge_returned(part[1])
            case _:
                raise AssertionError(part)

    def _extend(self, state, q, k, v, calls):
        self.plan.engine.extend(state, q, k, v, calls, self.scores, self._saves)

    def _attend_received_keys(self, index: int) -> None:
        keys, k, v = self.received(index)
        if keys.queries is None:
            return self._extend(self.state, self.q, k, v, keys.calls)
        state = self._empty(len(keys.queries))
        self._extend(state, self.q.index_select(2, keys.queries), k, v, keys.calls)
        self._merge(keys.queries, state)

    def _attend_remote_queries(self, index: int) -> None:
        remote = self.plan.remote_queries[index]
        shape = (self.q.shape[0], len(remote.heads), remote.tokens)
        (q,) = _unpacked(self._remote.pop(index), (shape, self.q.shape[3], self.q.dtype))
        state = self._empty(remote.tokens)
        self._extend(state, self.spread(q, remote.heads), self.k, self.v, remote.calls)
        some = Partial(*(x.index_select(1, remote.heads) for x in state))
        lse, lse_lo = some.rounded_lse()
        self._results[index] = _packed(lse, torch.exp(lse_lo), some.out)

    def _merge_returned(self, index: int) -> None:
        heads, tokens = self.plan.sent_queries[index]
        shape = (self.q.shape[0], len(heads), len(tokens))
        statistics, sums = (shape, 1, torch.float32), (shape, self.v.shape[3], torch.float32)
        received = self._returned.pop(index)
        lse, weight, out = _unpacked(received, statistics, statistics, sums)
        lse = (lse.double() + weight.double().log())[..., 0]
        # Rows of other bands have seen nothing.
        lse = self.spread(lse, heads, -torch.inf)
        self._merge(tokens, Partial(self.spread(out, heads), lse))

    def _merge(self, tokens: Tensor, partial: Partial) -> None:
        """Joins the partial softmaxes of some tokens."""
        every = ((0, 1, 1), (0, 1, self.q.shape[2]), (0, 1, self.q.shape[1]))
        self.state.merge(partial, Selection(None, *every, tokens))


class Backward(Pass):
    """Gradients of local queries, keys and values, given the final statistics of rows."""

    def __init__(
        self, plan: RankPlan, q: Tensor, k: Tensor, v: Tensor, rows: Rows, scores: Scores
    ):
        super().__init__(plan, q, k, v, scores)
        self._rows = rows
        self.sums = tuple(dense_like(x, tuple(x.shape), torch.float32).zero_() for x in (q, k, v))
        self._gradients: dict[int, Tensor] = {}
        """Of received keys, with those of children in a broadcast tree: dk, then dv."""
        self._remote: dict[int, Tensor] = {}
        self._results: dict[int, Tensor] = {}
        self._returned: dict[Part, Tensor] = {}

    def own_send(self, part):
        match part:
            case ("received_keys", index, _, "return", _):
                return self._gradients.pop(index).view(torch.uint8)
            case ("sent_queries", index, _, "outbound", _):
                return self._pack_queries(self.plan.sent_queries[index])
            case ("remote_queries", index, _, "return", _):
                return self._results.pop(index)
        raise AssertionError(part)

    def own_keep(self, part, received):
        match part:
            case ("remote_queries", index, _, "outbound", _):
                self._remote[index] = received
            case (_, _, _, "return", _):
                self._returned[part] = received
            case _:
                raise AssertionError(part)

    def compute(self, part):
        match part:
            case ("local_keys", index, *_):
                some, calls = self.local(index)
                dq, dk, dv = self.sums
                sums = dq, dk[:, :, some], dv[:, :, some]
                self._accumulate(sums, self.q, self.k[:, :, some], self.v[:, :, some], calls)
            case ("received_keys", index, *_):
                self._received_keys(index)
            case ("remote_queries", index, *_):
                self._remote_queries(index)
            case _:
                self._add_returned(part)

    def _accumulate(self, sums, q, k, v, calls, rows: Rows | None = None):
        rows = self._rows if rows is None else rows
        self.plan.engine.accumulate(sums, q, k, v, calls, rows, self.scores)

    def _received_keys(self, index: int) -> None:
        keys, k, v = self.received(index)
        gradients = torch.zeros(k.numel() + v.numel(), device=k.device)
        self._gradients[index] = gradients
        dk, dv = gradients[: k.numel()].view(k.shape), gradients[k.numel() :].view(v.shape)
        if keys.queries is None:
            return self._accumulate((self.sums[0], dk, dv), self.q, k, v, keys.calls)
        q = self.q.index_select(2, keys.queries)
        rows = tuple(None if x is None else x.index_select(2, keys.queries) for x in self._rows)
        dq = torch.zeros(q.shape, device=q.device)
        self._accumulate((dq, dk, dv), q, k, v, keys.calls, rows)
        self.sums[0][:, :, keys.queries] += dq

    def _pack_queries(self, chosen: Selected) -> Tensor:
        """Queries and what their gradients need: ``lse`` in two f32, ``delta = out · dout − dlse``, ``q``,
        ``dout``."""
        out, lse, dout, dlse = (None if x is None else chosen.of(x) for x in self._rows)
        delta = (out.float() * dout.float()).sum(-1)
        if dlse is not None:
            delta -= dlse
        return _packed(*Partial(out, lse).rounded_lse(), delta, chosen.of(self.q), dout)

    def _remote_queries(self, index: int) -> None:
        remote = self.plan.remote_queries[index]
        shape = (self.q.shape[0], len(remote.heads), remote.tokens)
        one = (shape, 1, torch.float32)
        lse, lse_lo, delta, q, dout = _unpacked(
            self._remote.pop(index),
            one,
            one,
            one,
            (shape, self.q.shape[3], self.q.dtype),
            (shape, self.v.shape[3], self.v.dtype),
        )
        rows = (lse.double() + lse_lo, delta, q, dout)
        lse, delta, q, dout = (self.spread(x, remote.heads) for x in rows)
        # With an output of 0, this gradient of the log-sum-exp has kernels find the same delta.
        rows = (torch.zeros_like(dout), lse[..., 0], dout, -delta[..., 0])
        dq = torch.zeros(q.shape, device=q.device)
        sums = dq, *self.sums[1:]
        self._accumulate(sums, q, self.k, self.v, remote.calls, rows)
        self._results[index] = _packed(dq.index_select(1, remote.heads))

    def _add_returned(self, part: Part) -> None:
        received = self._returned.pop(part).view(torch.float32)
        dq, dk, dv = self.sums
        match part:
            case ("sent_keys", index, *_):
                rows = self.plan.sent_keys[index]
                shape = (self.q.shape[0], len(rows.heads), len(rows.tokens))
                sizes = [(shape, x.shape[3], torch.float32) for x in (dk, dv)]
                for into, gradient in zip((dk, dv), _unpacked(received.view(torch.uint8), *sizes)):
                    rows.add(into, gradient)
            case ("forwarded_keys", index, *_):
                self._gradients[index] += received
            case ("sent_queries", index, *_):
                rows = self.plan.sent_queries[index]
                rows.add(dq, received.view(-1, len(rows.heads), len(rows.tokens), dq.shape[3]))
            case _:
                raise AssertionError(part)


def _packed(*tensors: Tensor) -> Tensor:
    """The bytes of tensors, one after another."""
    return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors])


def _unpacked(
    received: Tensor, *sizes: tuple[tuple[int, int, int], int, torch.dtype]
) -> list[Tensor]:
    """The tensors of a message, ``(batch, head, token, dim)``, as views."""
    tensors, first = [], 0
    for shape, dim, dtype in sizes:
        count = torch.Size(shape).numel() * dim * dtype.itemsize
        tensors.append(received[first : first + count].view(dtype).view(*shape, dim))
        first += count
    return tensors
