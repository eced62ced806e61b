"""What modules with a process group have in common: context parallelism, and checkpointing.

A module with a group gets this rank's tokens of a sequence and calls ``ring_attention``. Everything
else it computes is of its own tokens alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan import Dilated
from longspan.torch._lengths import placed
from longspan.torch._ranks import TIMEOUT, ranks_of
from longspan.torch._ring import known_shards, ring_attention, ring_positions
from longspan.torch._shards import Shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Context:
    """The ranks that hold a module's sequence together. Copies of the module share it."""

    def __init__(self, group: ProcessGroup, shards: str):
        self.group, ranks = ranks_of(group)
        self.shards = known_shards(shards, ranks.size)

    def __deepcopy__(self, _memo: Any) -> Context:
        return self

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            "this module holds a process group, which is of this process alone: save its state_dict(), "
            "and load that into a module made with group="
        )

    def __repr__(self) -> str:
        return f"group of {self.group.size()} ranks, shards={self.shards!r}"

    def length(self, own: int, tokens: int | None) -> int:
        """That of the whole sequence; ranks tell each other what they hold where it isn't known."""
        if tokens is not None:
            return tokens
        ranks = ranks_of(self.group)[1]
        return sum(ranks.numbers("the length of the sequence", lambda: (own, None)))

    def own_part(self, work: Callable[..., T], *arguments: Any) -> T:
        """What this rank computes before a call: the others hear of its errors."""
        try:
            return work(*arguments)
        except Exception:
            ranks = ranks_of(self.group)[1]
            with ranks.lock:
                ranks.raised(TIMEOUT)
            raise

    def positions(self, tokens: int, pattern: str | Dilated) -> Tensor:
        """Those of this rank's tokens."""
        rank, ranks = self.group.rank(), self.group.size()
        return ring_positions(tokens, rank, ranks, self.shards, pattern=pattern)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: str | Dilated, **options: Any
    ) -> Tensor:
        """``ring_attention`` over this group; grouped queries are allowed."""
        return ring_attention(
            q, k, v, pattern, group=self.group, shards=self.shards, enable_gqa=True, **options
        )


def context_of(group: ProcessGroup | None, shards: str) -> Context | None:
    """The ranks of a module, or None for one process."""
    if group is not None:
        return Context(group, shards)
    if shards != "contiguous":
        raise ValueError(
            f"shards is {shards!r} without a group, expected it left out: give the group whose ranks "
            "hold the sequence, such as torch.distributed.group.WORLD"
        )
    return None


def sharding(
    context: Context | None,
    tokens: int,
    pattern: str | Dilated,
    key_padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Shards:
    """Which tokens of a sequence this rank holds for a module's calls."""
    if context is None:
        raise ValueError(
            "sharding: this module has no group, so it takes whole sequences; give one to its "
            "constructor"
        )
    batch = 1 if key_padding is None else key_padding.shape[0]
    return Shards(
        tokens,
        group=context.group,
        shards=context.shards,
        pattern=placed(pattern, key_padding, cu_seqlens, batch, tokens),
    )


def own_part(context: Context | None, work: Callable[..., T], *arguments: Any) -> T:
    """Work before a call; over ranks, the others hear of its errors."""
    return work(*arguments) if context is None else context.own_part(work, *arguments)


def whole_length(own: int, tokens: int | None) -> None:
    """Refuses another length than the one that a process without a group has."""
    if tokens is not None and tokens != own:
        raise ValueError(
            f"tokens is {tokens} without a group, expected {own}, which this process holds: leave it "
            "out, or give the module a group"
        )


def checkpointed(on: bool, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Work whose activations are computed once more in the backward pass, where that is asked for."""
    if on and torch.is_grad_enabled():
        return checkpoint(work, *arguments, use_reentrant=False, **named)
    return work(*arguments, **named)
