"""A layout as torch's ``BlockMask``, for FlexAttention.

``Layout.to_block_mask`` and ``Pattern.to_block_mask`` end here. The lists of blocks come from the
layout and its transpose, in time that follows the number of blocks; ``create_block_mask`` looks at
every pair of tokens, and ``BlockMask.from_kv_blocks`` makes a matrix of all blocks to transpose it.

Lists have room for all blocks of a row unless told otherwise. The kernels read only those that a
row has, but FlexAttention's CPU kernel refuses masks whose lists are narrower, FlashAttention-4
wants just this width, and torch takes it for the number of columns where it prints a mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    from longspan._longspan import Layout

#: The lists of a BlockMask, in the order in which layouts write them.
LISTS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)


def to_block_mask(
    layout: Layout,
    device: torch.device | str = "cpu",
    width: Literal["all", "longest"] = "all",
) -> BlockMask:
    """The layout as a ``BlockMask`` on a device."""
    try:
        import torch
        from torch.nn.attention.flex_attention import BlockMask
    except ImportError as error:
        message = "to_block_mask needs torch 2.5 or later, which has FlexAttention: install torch"
        raise ImportError(message) from error
    from longspan import _mask_mod

    if layout.batch == 0:
        raise ValueError("the layout has no batch entries, expected key_padding with at least one")
    device = torch.device(device)
    # Zeros are made where they are needed; only numbers that say something travel.
    on_host = device.type == "cpu"
    lists = layout._block_lists(width if on_host else "longest")
    tensors = dict(zip(LISTS, (torch.from_numpy(numbers) for numbers in lists), strict=True))
    if not on_host:
        across = {"kv_indices": layout.columns, "q_indices": layout.rows}
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(device)
            room = across.get(name.removeprefix("full_"))
            if width == "all" and room is not None:
                tensors[name] = widened(tensors[name], max(room, 1))
    return BlockMask(
        seq_lengths=(layout.tokens_q, layout.tokens_k),
        BLOCK_SIZE=(layout.block, layout.block),
        mask_mod=_mask_mod.mask_mod(layout, device),
        **tensors,
    )


def widened(indices: torch.Tensor, room: int) -> torch.Tensor:
    """The same lists with zeros behind them."""
    wide = indices.new_zeros((*indices.shape[:-1], room))
    wide[..., : indices.shape[-1]] = indices
    return wide
