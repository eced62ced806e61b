"""Relative-position biases of T5 and its relatives, as tables over distances.

Their layers add ``position_bias``, a tensor ``(1, heads, queries, keys)``, to scores: the first layer looks distances
up in its embedding ``relative_attention_bias``, and later layers are handed its tensor (in UMT5 every layer has an
embedding). Distances from ``relative_attention_max_distance`` on share a bucket, so one row of the tensor holds all of
it: the ``compute_bias`` of the layer itself, for one query, gives the table.

``prepare`` extends the classes of such layers, once each, for names that are registered: a ``PositionBias`` takes the
place of the tensor, and goes from layer to layer as the tensor does. It refers to the layer that has the embedding.
With gradients each layer makes its own table, so that they reach the embedding also under activation checkpointing.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Table(NamedTuple):
    """A bias as ``longspan.torch.attention`` takes it."""

    bias_table: Tensor | None = None
    bias_right: int = 0


class PositionBias:
    """In place of a tensor ``(1, heads, queries, keys)``."""

    def __init__(self, owner: torch.nn.Module | None) -> None:
        self.owner = owner
        """The layer with the embedding; none for a bias of 0."""
        self.table: Table | None = None
        """What layers share without gradients."""


def prepare(
    model: torch.nn.Module, name_of: Callable[[torch.nn.Module], str | None], names: Container[str | None]
) -> None:
    """Extends the classes of a model's layers that use attention of these names, or are about to."""
    for layer in model.modules():
        kind = type(layer)
        if not _has_table(kind) or name_of(layer) not in names:
            continue
        if layer.has_relative_attention_bias:
            _check_meaning(layer)
        if not hasattr(kind.compute_bias, _EXTENDED):
            kind.compute_bias = _of_layer(kind.compute_bias, names)
            if "position_bias" in inspect.signature(kind.forward).parameters:
                kind.forward = _without_zeros(kind.forward, names)
            else:
                setattr(kind, _OWN, True)


#: An attribute of methods that were extended.
_EXTENDED = "_longspan_extended"
#: An attribute of classes whose layers take no bias of an earlier layer: each makes its own.
_OWN = "_longspan_own_bias"


def _of_layer(original: Callable, names: Container[str]) -> Callable:
    """A ``compute_bias`` without a tensor."""

    @functools.wraps(original)
    def compute_bias(self: torch.nn.Module, *args: Any, **options: Any) -> Tensor | PositionBias:
        if self.config._attn_implementation in names:
            return PositionBias(self)
        return original(self, *args, **options)

    setattr(compute_bias, _EXTENDED, True)
    return compute_bias


def _without_zeros(original: Callable, names: Container[str]) -> Callable:
    """A ``forward`` that makes no tensor of zeros where a layer has no bias, as in cross-attention."""
    index = list(inspect.signature(original).parameters).index("position_bias") - 1

    @functools.wraps(original)
    def forward(self: torch.nn.Module, *args: Any, **options: Any) -> Any:
        if self.config._attn_implementation in names and not self.has_relative_attention_bias:
            if len(args) > index:
                bias = PositionBias(None) if args[index] is None else args[index]
                args = (*args[:index], bias, *args[index + 1 :])
            elif options.get("position_bias") is None:
                options["position_bias"] = PositionBias(None)
        return original(self, *args, **options)

    return forward


#: Of T5's ``compute_bias``. LongT5's local attention, which is its own, has others.
_PARAMETERS = ["self", "query_length", "key_length", "device", "past_seen_tokens"]


@functools.cache
def _has_table(kind: type) -> bool:
    """Whether layers of a class compute their bias as T5's do."""
    compute = getattr(kind, "compute_bias", None)
    if not hasattr(kind, "_relative_position_bucket") or not inspect.isfunction(compute):
        return False
    return list(inspect.signature(compute).parameters) == _PARAMETERS


def table(layer: torch.nn.Module, position_bias: Any) -> Table:
    """What a layer hands over, or an error."""
    if position_bias is None:
        return Table()
    if isinstance(position_bias, PositionBias):
        if position_bias.owner is None:
            return Table()
        if torch.is_grad_enabled():
            return _of(position_bias.owner)
        if position_bias.table is None:
            position_bias.table = _of(position_bias.owner)
        return position_bias.table
    if getattr(layer, _OWN, False) and not layer.has_relative_attention_bias:
        # Zeros, which the layer made itself; their memory is never touched.
        return Table()
    raise NotImplementedError(
        f"{type(layer).__name__} hands over position_bias, a bias of every pair: expected a bias of T5's kind, a table "
        'over distances, of a model that was made with attn_implementation="longspan" or changed over with '
        'set_attn_implementation; use attn_implementation="eager" for others'
    )


def _of(owner: torch.nn.Module) -> Table:
    """Columns are ``query - key``, from ``-reach`` to ``reach``: a query at position ``reach``, with keys before and
    after it."""
    reach = max(owner.relative_attention_max_distance, owner.relative_attention_num_buckets)
    row = _tensor_of(owner, 1, 2 * reach + 1, reach)
    return Table(row[0, :, 0].flip(1), reach)


def _tensor_of(owner: torch.nn.Module, queries: int, keys: int, past: int) -> Tensor:
    """What the layer's own ``compute_bias`` makes."""
    return inspect.unwrap(type(owner).compute_bias)(owner, queries, keys, past_seen_tokens=past)


#: What was checked.
_checked: set[tuple[Any, ...]] = set()


def _check_meaning(owner: torch.nn.Module) -> None:
    """The biases of a class depend on distances alone, and are the same from the table's ends on.

    Classes are recognised by their methods, so a release that computes something else in them is found here.
    """
    sizes = owner.relative_attention_num_buckets, owner.relative_attention_max_distance
    key = type(owner), *sizes, getattr(owner, "is_decoder", None)
    if key in _checked:
        return
    probe = copy.copy(owner)
    buckets = torch.nn.Embedding(sizes[0], 1, device="cpu", _weight=torch.arange(sizes[0], device="cpu")[:, None] + 1.0)
    # Weights of models that are being loaded have no values yet.
    probe.__dict__["_modules"] = {"relative_attention_bias": buckets}
    with torch.no_grad():
        table, reach = _of(probe)
        past = 2 * reach + 7
        biases = _tensor_of(probe, 2, 2 * past, past)[0, 0]
    distances = torch.arange(past, past + 2, device="cpu")[:, None] - torch.arange(2 * past, device="cpu")
    if not torch.equal(table[0][distances.clamp(-reach, reach) + reach], biases):
        raise RuntimeError(
            f"{type(owner).__name__} of this release of transformers has a bias that is no table over distances up to "
            f"{max(sizes)}: use a release that longspan is tested with, or attn_implementation=\"eager\""
        )
    _checked.add(key)
