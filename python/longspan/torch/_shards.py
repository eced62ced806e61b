"""Training with one sequence over the ranks of a process group: data, loss and gradients."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from longspan import Dilated, Pattern
from longspan.torch._ranks import ranks_of, travels
from longspan.torch._ring import ring_positions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Bytes of gradients that are summed at once: one message is long enough, and little is copied.
_BUCKET = 32 << 20


class Shards:
    """Which tokens of one sequence this rank of a process group holds.

    >>> import torch, torch.distributed as dist, longspan.torch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> shards = longspan.torch.Shards(1000, shards="zigzag")
    >>> ids = torch.randint(256, (2, 1000))
    >>> mine, labels = shards.shard(ids), shards.next_tokens(ids)
    >>> labels[:, :-1].equal(mine[:, 1:]), labels[0, -1].item()
    (True, -100)
    >>> shards.gather(mine).equal(ids)
    True
    >>> dist.destroy_process_group()

    ``tokens`` is the length of the whole sequence. ``group`` and ``shards`` are those of
    ``ring_attention``; ``pattern`` is that of ``ring_positions``.
    ``positions`` are those of this rank's tokens, int64. Modules with a group have a method
    ``sharding`` that makes the right one.
    """

    def __init__(
        self,
        tokens: int,
        *,
        group: ProcessGroup | None = None,
        shards: str = "contiguous",
        pattern: Pattern | Dilated | str | None = None,
    ):
        self.group, ranks = ranks_of(group)
        self.tokens, self.shards = operator.index(tokens), shards
        self._pattern = pattern
        self.positions: Tensor = self._positions(ranks.rank)

    def _positions(self, rank: int) -> Tensor:
        ranks = self.group.size()
        return ring_positions(self.tokens, rank, ranks, self.shards, pattern=self._pattern)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor of the whole sequence."""
        if x.shape[dim] != self.tokens:
            raise ValueError(
                f"x has {x.shape[dim]} tokens on axis {dim}, expected {self.tokens}: the whole sequence"
            )
        return x.index_select(dim, self.positions.to(x.device))

    def next_tokens(
        self, ids: Tensor, ignore_index: int = -100, *, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """This rank's labels for next-token prediction, of ``ids`` ``(batch, tokens)``, the whole
        sequence: the token after each one, and ``ignore_index`` behind the last one of a sequence."""
        if ids.ndim != 2:
            raise ValueError(f"ids has {ids.ndim} axes, expected 2: (batch, tokens)")
        labels = F.pad(ids[:, 1:], (0, 1), value=ignore_index)
        if cu_seqlens is not None:
            if cu_seqlens.ndim != 1:
                raise ValueError(
                    f"cu_seqlens has {cu_seqlens.ndim} axes, expected 1: over ranks all batch entries "
                    "have the same sequences"
                )
            labels[:, cu_seqlens[cu_seqlens > 0].long() - 1] = ignore_index
        return self.shard(labels)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """The tensor of the whole sequence on every rank, from each rank's part of it, for evaluation:
        without gradients."""
        ranks = ranks_of(self.group)[1]
        ranks.numbers("gathering a tensor", lambda: (0, self._checked(x, dim)))
        mine = x.detach().movedim(dim, 0)
        positions = [self._positions(rank) for rank in range(ranks.size)]
        longest = max(map(len, positions))
        rows = mine.new_zeros(longest, *mine.shape[1:])
        rows[: len(mine)] = mine
        # As bytes, since Gloo has not all types.
        parts = [torch.empty_like(rows) for _ in positions]
        sent, received = _bytes(rows), [_bytes(part) for part in parts]
        dist.all_gather(received, sent, group=self.group)
        whole = mine.new_empty(self.tokens, *mine.shape[1:])
        for held, part in zip(positions, parts):
            whole[held] = part[: len(held)]
        _let_go(sent, *received)
        return whole.movedim(0, dim)

    def _checked(self, x: Tensor, dim: int) -> tuple[object, ...]:
        if not travels(self.group, x.device):
            raise ValueError(
                f"x is on {x.device}, for which the process group has no backend, expected the CPU: x.cpu() "
                "copies it there"
            )
        if x.shape[dim] != len(self.positions):
            raise ValueError(
                f"x has {x.shape[dim]} tokens on axis {dim}, expected {len(self.positions)}, which this "
                f"rank holds of {self.tokens}"
            )
        rest = [size for axis, size in enumerate(x.shape) if axis != dim % x.ndim]
        return rest, dim % x.ndim, x.dtype, self.tokens, self.shards

    def __repr__(self) -> str:
        return (
            f"Shards({self.tokens}, shards={self.shards!r}): {len(self.positions)} tokens of rank "
            f"{self.group.rank()} of {self.group.size()}"
        )


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


#: Tensors of the last collective call, without their memory. Threads of Gloo hold theirs for a moment
#: after the call has returned, and the last holder of a tensor needs the GIL to free it. In torch 2.6
#: destroy_process_group waits for these threads with the GIL: it would wait forever.
_LAST: list[Tensor] = []


def _let_go(*tensors: Tensor) -> None:
    """Frees the memory of tensors that a collective call had."""
    for x in tensors:
        x.untyped_storage().resize_(0)
    _LAST[:] = tensors


def ring_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """This rank's part of the cross entropy of a sequence that ranks hold together.

    It is the sum over this rank's ``labels`` ``(…,)``, divided by the number of labels of all ranks
    that aren't ``ignore_index``: the sum over ranks is the mean loss of one process. ``logits`` are
    ``(…, classes)``.

    >>> import torch, torch.distributed as dist, longspan.torch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> logits, labels = torch.randn(2, 100, 10, requires_grad=True), torch.randint(10, (2, 100))
    >>> loss = longspan.torch.ring_loss(logits, labels)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits.mT, labels))
    True
    >>> loss.backward()
    >>> dist.destroy_process_group()

    All ranks of ``group`` call it, in the same order as their other calls. Gradients of parameters are
    summed over ranks afterwards: ``sum_gradients``, or ``scale_loss`` under DDP or FSDP2.
    """

    sums: list[Tensor] = []

    def own() -> tuple[int, object]:
        if logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, expected {tuple(logits.shape[:-1])}, that of "
                "logits without their last axis: one label per token of this rank"
            )
        rows, targets = logits.flatten(0, -2), labels.flatten()
        sums.append(F.cross_entropy(rows, targets, ignore_index=ignore_index, reduction="sum"))
        return int((labels != ignore_index).sum()), (logits.shape[-1], logits.dtype)

    counts = ranks_of(group)[1].numbers("counting labels", own)
    return sums[0] / sum(counts)


def scale_loss(loss: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """A loss times the ranks of a group, for where gradients are averaged.

    DDP and FSDP2 divide the sum of gradients by their number of ranks. If the ranks of ``group``,
    which hold a sequence together, are among these, the mean over sequences is left only with their
    number as a factor.

    >>> import torch, torch.distributed as dist, longspan.torch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> longspan.torch.scale_loss(torch.tensor(2.0))
    tensor(2.)
    >>> dist.destroy_process_group()
    """
    return loss * ranks_of(group)[1].size


def sum_gradients(
    parameters: nn.Module | Iterable[Tensor], *, group: ProcessGroup | None = None
) -> None:
    """Sums the gradients of a module's parameters, or of those given, over the ranks of a group.

    >>> import torch, torch.distributed as dist, longspan.torch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layer = torch.nn.Linear(3, 2)
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> longspan.torch.sum_gradients(layer)
    >>> layer.bias.grad
    tensor([1., 1.])
    >>> dist.destroy_process_group()

    Called on all ranks after ``backward``; all get the same bits. A parameter that has no gradient on
    one rank counts as zero there if another rank has one. Half types are summed in f32.
    """
    module = isinstance(parameters, nn.Module)
    given = list(parameters.parameters() if module else parameters)
    wanted = [x for x in given if x.requires_grad]
    group, ranks = ranks_of(group)
    ranks.numbers("summing gradients", lambda: (0, _checked_gradients(wanted, group)))
    if not wanted:
        return
    has = torch.tensor([x.grad is not None for x in wanted], dtype=torch.uint8)
    has = has.to(wanted[0].device)
    dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
    found = [x for x, any_has in zip(wanted, has.tolist()) if any_has]
    _let_go(has)
    for bucket in _buckets(found):
        _sum(bucket, group)


def _checked_gradients(parameters: list[Tensor], group: ProcessGroup) -> list[object]:
    for index, x in enumerate(parameters):
        for value in (x, x.grad):
            if value is None:
                continue
            if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
                raise TypeError(
                    f"parameter {index} has a {type(value).__name__} of layout {value.layout}, expected "
                    "dense tensors of this process: with DTensor leave the sum to FSDP2, and use "
                    "scale_loss"
                )
            if not travels(group, value.device) or value.device != parameters[0].device:
                raise ValueError(
                    f"parameter {index} is on {value.device}, expected one device of all parameters, for which "
                    "the process group has a backend"
                )
    return [(tuple(x.shape), x.dtype) for x in parameters]


def _buckets(parameters: list[Tensor]) -> Iterable[list[Tensor]]:
    """Those of one type, some at a time."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for x in parameters:
        by_type.setdefault(_sum_type(x.dtype), []).append(x)
    for dtype, some in by_type.items():
        bucket: list[Tensor] = []
        size = 0
        for x in some:
            bucket.append(x)
            size += x.numel() * dtype.itemsize
            if size >= _BUCKET:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@torch.no_grad()
def _sum(parameters: list[Tensor], group: ProcessGroup) -> None:
    dtype = _sum_type(parameters[0].dtype)
    zero = [x.new_zeros(()).expand(x.shape) for x in parameters]
    own = [other if x.grad is None else x.grad for x, other in zip(parameters, zero)]
    flat = torch.cat([x.reshape(-1).to(dtype) for x in own])
    dist.all_reduce(flat, group=group)
    for x, total in zip(parameters, flat.split([x.numel() for x in parameters])):
        if x.grad is None:
            x.grad = torch.empty_like(x)
        x.grad.copy_(total.view(x.shape))
    _let_go(flat)
