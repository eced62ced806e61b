"""Packed sequences as ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` describes them.

The model hands over ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``. transformers finds the
same packing in ``position_ids``, unless there is a cache. Where both are there, they have to agree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longspan.transformers._mask import Mask

_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def taken(others: dict[str, Any]) -> dict[str, Any]:
    """The packing among the arguments of a layer, removed from them."""
    found = {name: others.pop(name, None) for name in _NAMES}
    return {name: value for name, value in found.items() if value is not None}


def applied(packing: dict[str, Any], mask: Mask) -> Mask:
    """The mask with the packing, or an error where they differ."""
    bounds = bounds_of(packing)
    if mask.cu_seqlens is not None:
        if len(mask.cu_seqlens) != 1 or mask.cu_seqlens[0].tolist() != bounds.tolist():
            raise ValueError(
                f"cu_seq_lens_q is {bounds.tolist()}, and position_ids restart at "
                f"{[each.tolist() for each in mask.cu_seqlens]}: expected the same sequences in both"
            )
        return mask
    offset = int(mask.query_offset)
    if mask.key_padding is not None or not mask.moves or mask.tokens_q != mask.tokens_k or offset or mask.key_offset:
        raise ValueError(
            f"cu_seq_lens_q with {mask.tokens_q} queries from {offset} on, {mask.tokens_k} keys from {mask.key_offset} "
            f"on and the mask {mask.pattern}{'' if mask.key_padding is None else ' with padding'}: expected the same "
            "tokens as queries and keys, a causal, bidirectional or sliding-window mask and no attention_mask"
        )
    if mask.batch != 1 or int(bounds[-1]) != mask.tokens_q:
        raise ValueError(
            f"cu_seq_lens_q ends at {int(bounds[-1])}, with {mask.batch} batch entries of {mask.tokens_q} tokens: "
            "expected one batch entry, and its length"
        )
    return replace(mask, cu_seqlens=(bounds,))


def bounds_of(packing: dict[str, Any]) -> Tensor:
    """Where sequences begin, and the last one ends."""
    queries, keys = packing.get("cu_seq_lens_q"), packing.get("cu_seq_lens_k")
    if queries is None or keys is None:
        raise ValueError(f"{' and '.join(packing)}: expected cu_seq_lens_q and cu_seq_lens_k too")
    if not torch.equal(queries, keys):
        raise ValueError(
            f"cu_seq_lens_q is {queries.tolist()} and cu_seq_lens_k is {keys.tolist()}, expected the same"
        )
    longest = int(queries.diff().max())
    for name in ("max_length_q", "max_length_k"):
        if name in packing and int(packing[name]) < longest:
            raise ValueError(f"{name} is {int(packing[name])}, expected at least {longest}, the longest sequence")
    return queries
