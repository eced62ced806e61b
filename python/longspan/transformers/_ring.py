"""One sequence over the ranks of a process group: what a layer of transformers calls under a name with a group.

The model's input is this rank's tokens, so masks are made for local lengths. Causal, window and chunk are read from
them as ever, and are of positions in the whole sequence, which is where ``ring_attention`` applies them. Positions of
zigzag and striped shards have gaps, which transformers takes for packed sequences: ``mask`` leaves that reading out,
and position ids are compared with those of the sharding instead.

An error of one rank alone would leave the others waiting. So a model's call runs inside of ``Ring.telling``: a rank
that fails tells the others, which get a ``RingError`` in the call that they are in.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from longspan import RingError
from longspan.torch import ring_attention, ring_positions
from longspan.torch._lengths import places_in_sequences
from longspan.torch._ranks import TIMEOUT, Ranks, ranks_of
from longspan.transformers import _attention, _bias, _mask, _packing, _pattern, _support
from longspan.transformers._families import check_call, check_config, refused, refused_cache
from longspan.transformers._mask import Mask

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SHARDS = ("contiguous", "zigzag", "striped")


#: An attribute of errors that the other ranks know of.
_TOLD = "_longspan_told"


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Around calls that tell the other ranks of their errors themselves."""
    try:
        yield
    except Exception as error:
        setattr(error, _TOLD, True)
        raise


class Ring:
    """The group and the shards of a name."""

    def __init__(self, name: str, group: ProcessGroup, shards: str) -> None:
        if shards not in SHARDS:
            why = ": layers may have different patterns, and balanced shards are those of one" * (shards == "balanced")
            raise ValueError(f"shards is {shards!r}, expected {', '.join(map(repr, SHARDS[:2]))} or {SHARDS[2]!r}{why}")
        ranks_of(group)
        self.name, self.shards = name, shards
        self._group = weakref.ref(group)

    @property
    def group(self) -> ProcessGroup:
        """A group that was destroyed is let go of."""
        group = self._group()
        if group is None:
            raise ValueError(
                f"the process group of attn_implementation={self.name!r} is gone: call "
                f"longspan.transformers.register({self.name!r}, group=…) with another one"
            )
        return group

    @property
    def ranks(self) -> Ranks:
        return ranks_of(self.group)[1]

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tells the other ranks of an error in here, once. What is a ``RingError`` they know already."""
        try:
            yield
        except RingError:
            raise
        except Exception as error:
            if not hasattr(error, _TOLD):
                setattr(error, _TOLD, True)
                ranks = self.ranks
                with ranks.lock, contextlib.suppress(RingError):
                    ranks.check()
                    ranks.raised(TIMEOUT)
            raise

    def tokens(self, held: int) -> int:
        """The length of the whole sequence, of which this rank holds so many tokens."""
        with _told():
            return sum(self.ranks.numbers("the tokens of a layer", lambda: (held, None)))


#: Those that names are registered with.
rings: dict[str, Ring] = {}


def extend() -> None:
    """Adds the checks of calls to models, once. Nothing changes for models that use other names."""
    if PreTrainedModel.__call__.__module__ != __name__:
        PreTrainedModel.__call__ = _checked_call(PreTrainedModel.__call__)
        GenerationMixin.generate = _checked_generate(GenerationMixin.generate)


def _checked_call(original: Callable) -> Callable:
    @functools.wraps(original)
    def call(self: PreTrainedModel, *args: Any, **options: Any) -> Any:
        if _support.name_in_use(self) in rings:
            return _call(original, self, args, options)
        return original(self, *args, **options)

    call.__module__ = __name__
    return call


@torch.compiler.disable(recursive=False)
def _call(original: Callable, model: PreTrainedModel, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    ring = rings[model.config._attn_implementation]
    with ring.telling():
        positional = inspect.signature(model.forward).bind_partial(*args).arguments
        check_call(ring.name, model, positional | options)
        return original(model, *args, **options)


def _checked_generate(original: Callable) -> Callable:
    @functools.wraps(original)
    def generate(self: GenerationMixin, *args: Any, **options: Any) -> Any:
        ring = rings.get(_support.name_in_use(self))
        if ring is not None:
            with ring.telling():
                raise refused(ring.name, "generate, whose new tokens no rank has", "a model under another name")
        return original(self, *args, **options)

    return generate


@torch.compiler.disable
def mask(*, ring: Ring, **given: Any) -> Mask:
    """``_mask.mask`` for this rank's tokens."""
    with ring.telling():
        found, reading = _mask.read(**given)
        if _mask.key_padding(found, reading.padding) is not None:
            raise NotImplementedError(
                f"attention_mask has zeros, which attn_implementation={ring.name!r} has no padding for: expected "
                "batch entries of one length, without attention_mask"
            )
        return found


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: _bias.PositionBias | None = None,
    *,
    ring: Ring,
    registered: _pattern.Registered | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """``_attention.attention`` of this rank's tokens."""
    with ring.telling():
        packing = _packing.taken(others)
        mask = _attention.checked_mask(module, query, key, attention_mask, sliding_window, others)
        _check_layer(ring, module, mask, others)
        bounds = _bounds(ring, mask, packing)
        mask = _attention.with_pattern(module, mask, attention_mask, _pattern.of_layer(module, registered))
        scores = _attention.scores_of(module, scaling, dropout, softcap, s_aux, position_bias)
        ids = _position_ids(ring, module, query, others)
    tokens = ring.tokens(query.shape[2])
    with ring.telling():
        _check_positions(ring, ids, tokens, bounds)
    where = {"group": ring.group, "shards": ring.shards, "tokens": tokens, "cu_seqlens": bounds, "timeout": TIMEOUT}
    with _told():
        out = ring_attention(query, key, value, mask.pattern, **where, **scores)
    return out.transpose(1, 2).contiguous(), None


def _check_layer(ring: Ring, module: torch.nn.Module, mask: Mask, others: dict[str, Any]) -> None:
    check_config(ring.name, module)
    if _pattern.is_cross(module):
        raise refused(ring.name, f"{type(module).__name__}, which is cross-attention", "a decoder without an encoder")
    if others.get("use_cache") or mask.tokens_q != mask.tokens_k or int(mask.query_offset) or mask.key_offset:
        raise refused_cache(ring.name)


def _position_ids(ring: Ring, module: torch.nn.Module, query: Tensor, others: dict[str, Any]) -> Tensor:
    ids = others.get("position_ids")
    if ids is None:
        raise refused(ring.name, f"{type(module).__name__} without position_ids", "a model that hands them to layers")
    shapes = [(rows, query.shape[2]) for rows in (1, query.shape[0])]
    if tuple(ids.shape) not in shapes:
        raise ValueError(f"position_ids have shape {tuple(ids.shape)}, expected {shapes[0]}: one per token of a rank")
    return ids


def _bounds(ring: Ring, mask: Mask, packing: dict[str, Any]) -> Tensor | None:
    """Where packed sequences begin in the whole sequence, and the last one ends."""
    if not packing:
        return None
    if not mask.moves or mask.batch != 1:
        raise refused(
            ring.name,
            f"cu_seq_lens_q with {mask.batch} batch entries and the mask {mask.pattern}",
            "one batch entry, and a causal, bidirectional or sliding-window mask",
        )
    return _packing.bounds_of(packing)


def _check_positions(ring: Ring, ids: Tensor, tokens: int, bounds: Tensor | None) -> None:
    """Position ids are those of the sharding; with packed sequences they count within each."""
    ranks = ring.ranks
    if bounds is not None and (int(bounds[0]), int(bounds[-1])) != (0, tokens):
        raise ValueError(
            f"cu_seq_lens_q goes from {int(bounds[0])} to {int(bounds[-1])}, expected 0 to {tokens}, the tokens of all "
            "ranks: give the bounds of the whole sequence, the same on every rank"
        )
    places = places_in_sequences(tokens, None, bounds, ids.device)
    expected = places[ring_positions(tokens, ranks.rank, ranks.size, ring.shards)]
    if ids.shape[1] != len(expected):
        raise ValueError(
            f"rank {ranks.rank} holds {ids.shape[1]} tokens, expected {len(expected)}: {ring.shards} shards of "
            f"{tokens} tokens over {ranks.size} ranks; longspan.torch.Shards says which"
        )
    wrong = (ids != expected).any(0).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"position_ids[:, {first}] is {ids[:, first].tolist()} on rank {ranks.rank}, expected "
            f"{int(expected[first])} as in {ring.shards} shards of {tokens} tokens: pass "
            f'position_ids=longspan.torch.Shards({tokens}, group=…, shards="{ring.shards}").positions[None]; packed '
            "sequences need cu_seq_lens_q and cu_seq_lens_k too, those of the whole sequence"
        )
