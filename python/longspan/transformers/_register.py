"""``register``: the name "longspan", for transformers."""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

import longspan
from longspan.transformers import _read
from longspan.transformers._attention import attention
from longspan.transformers._mask import mask

#: Positions looked at: past the window and past the chunk of the samples below.
_POSITIONS = 11


def register(name: str = "longspan") -> None:
    """Makes ``attn_implementation="longspan"`` known to transformers, or whatever ``name`` says.

    >>> import longspan.transformers
    >>> longspan.transformers.register()

    Both halves are registered, attention and mask: with the first alone transformers would hand
    over no mask at all. Calling it again changes nothing.
    """
    if not isinstance(name, str) or not name or not name.isidentifier():
        raise ValueError(
            f"name is {name!r}, expected a word such as 'longspan': transformers reads '/', ':', "
            "'@' and '|' as parts of other names"
        )
    if name in ("eager", "sdpa") or "flash" in name or "flex_attention" in name:
        raise ValueError(f"name is {name!r}, which is transformers' own, expected another word")
    _check_meanings()
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def _check_meanings() -> None:
    """The functions of this release of transformers mean what their patterns say.

    They are recognised by what they are, not by what they compute. So a release in which a window
    is one token wider under the same name is found here, and not in a model's output.
    """
    at = torch.arange(_POSITIONS)
    zero = torch.zeros((1, 1), dtype=torch.int64)
    samples = (
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_overlay(3),
        masking_utils.sliding_window_bidirectional_overlay(3),
        masking_utils.sliding_window_causal_mask_function(4),
        masking_utils.sliding_window_bidirectional_mask_function(4),
        masking_utils.chunked_overlay(3, torch.zeros(1, dtype=torch.int64)),
        masking_utils.or_masks(
            masking_utils.causal_mask_function,
            masking_utils.sliding_window_bidirectional_overlay(2),
        ),
    )
    for sample in samples:
        pattern = longspan.Pattern(_read.read(sample).pattern)
        theirs = sample(zero, zero, at[:, None], at[None, :]).expand(_POSITIONS, _POSITIONS)
        for query, row in enumerate(theirs.tolist()):
            for key, seen in enumerate(row):
                if pattern.allows(query, key) != seen:
                    raise RuntimeError(
                        f"{_read.named(sample)} of this release of transformers "
                        f"{'shows' if seen else 'hides'} key {key} to query {query}, and {pattern} "
                        "doesn't: use a release of transformers that longspan is tested with"
                    )
