"""Mask functions become patterns that allow the same pairs, whatever lengths, offsets, padding."""

import pytest
import torch
from tiny import padding
from transformers import masking_utils as made
from transformers.models.gemma3 import modeling_gemma3

import longspan
from longspan.transformers._mask import Mask, mask

IDS = torch.tensor([[0] * 5 + [1] * 11 + [2]])
TWO = torch.tensor([[3] * 7 + [4] * 10, [0] * 16 + [9]])

FUNCTIONS = {
    "causal": made.causal_mask_function,
    "bidirectional": made.bidirectional_mask_function,
    "sliding": made.sliding_window_causal_mask_function(5),
    "sliding, one": made.sliding_window_causal_mask_function(1),
    "overlay alone": made.sliding_window_overlay(5),
    "sliding both ways": made.sliding_window_bidirectional_mask_function(3),
    "itself alone": made.sliding_window_bidirectional_mask_function(0),
    "chunked": made.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.int64)),
    "or": made.or_masks(made.causal_mask_function, made.sliding_window_bidirectional_overlay(2)),
    "or inside and": made.and_masks(
        made.or_masks(made.causal_mask_function, made.sliding_window_bidirectional_overlay(4)),
        made.sliding_window_overlay(6),
    ),
    "and inside or": made.or_masks(
        made.sliding_window_causal_mask_function(3), made.sliding_window_bidirectional_overlay(1)
    ),
    "two windows": made.and_masks(
        made.sliding_window_causal_mask_function(9), made.sliding_window_overlay(4)
    ),
}
PLACES = {
    "all": {"q_length": 17, "kv_length": 17},
    "decoding": {"q_length": 1, "kv_length": 17, "q_offset": 16},
    "second chunk": {"q_length": 6, "kv_length": 17, "q_offset": 11},
    "static": {"q_length": 3, "kv_length": 29, "q_offset": torch.tensor(12)},
    "sliding": {"q_length": 2, "kv_length": 9, "q_offset": 31, "kv_offset": 24},
}
PADDINGS = {
    "none": None,
    "left": padding("left", [33, 20], 33).bool(),
    "right": padding("right", [33, 20], 33).bool(),
    "of what is there": padding("left", [13, 11], 13).bool(),
}


def seen_by_theirs(function, batch, attention_mask, **places):
    """The mask of every pair that transformers' own SDPA mask has."""
    return made.sdpa_mask(
        batch_size=batch,
        mask_function=function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        **places,
    )[:, 0]


def seen_by(found):
    """The same of ours, pair by pair."""
    offset = int(found.query_offset)
    rows = []
    for entry in range(found.batch):
        inner = longspan.Pattern(found.pattern)
        if found.cu_seqlens is not None:
            bounds = found.cu_seqlens[entry if len(found.cu_seqlens) > 1 else 0]
            inner = longspan.packed(bounds.diff().tolist(), bounds.diff().tolist(), inner)
        first, end = 0, found.tokens_k
        if found.key_padding is not None:
            first, end = found.key_padding[entry].tolist()
        rows.append(
            [
                [
                    first <= key < end and inner.allows(query + offset, key + found.key_offset)
                    for key in range(found.tokens_k)
                ]
                for query in range(found.tokens_q)
            ]
        )
    return torch.tensor(rows)


@pytest.mark.parametrize("padded", PADDINGS)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_pairs(name, places, padded):
    attention_mask, places = PADDINGS[padded], PLACES[places]
    expected = seen_by_theirs(FUNCTIONS[name], 2, attention_mask, **places)
    found = mask(
        batch_size=2, mask_function=FUNCTIONS[name], attention_mask=attention_mask, **places
    )
    assert isinstance(found, Mask)
    assert torch.equal(seen_by(found), expected)


@pytest.mark.parametrize("ids", [IDS, TWO, IDS.expand(3, -1)])
@pytest.mark.parametrize("name", ["causal", "bidirectional", "sliding", "sliding both ways"])
def test_same_pairs_packed(name, ids):
    function = made.and_masks(FUNCTIONS[name], made.packed_sequence_mask_function(ids))
    places = {"q_length": 17, "kv_length": 17}
    expected = seen_by_theirs(function, len(ids), None, **places)
    found = mask(batch_size=len(ids), mask_function=function, **places)
    assert torch.equal(seen_by(found), expected)
    assert len(found.cu_seqlens) == (1 if ids is not TWO else 2)


@pytest.mark.parametrize("places", PLACES)
def test_same_pairs_of_embedding_gemma(places):
    """The functions that it makes itself."""
    everything = lambda *args: torch.tensor(True, dtype=torch.bool)
    whole = made.or_masks(made.causal_mask_function, everything)
    window = made.or_masks(FUNCTIONS["sliding"], modeling_gemma3._bidirectional_window_overlay(5))
    for function, width, pattern in ((whole, None, "full"), (window, 5, "(window(4, 0) & causal) | window(4, 4)")):
        expected = seen_by_theirs(function, 2, PADDINGS["left"], use_vmap=True, **PLACES[places])
        found = mask(batch_size=2, mask_function=function, attention_mask=PADDINGS["left"], **PLACES[places])
        assert torch.equal(seen_by(found), expected)
        assert (found.window, found.pattern) == (width, pattern)


def test_padding_inside_the_function():
    held = PADDINGS["left"]
    function = made.and_masks(made.causal_mask_function, made.padding_mask_function(held))
    places = PLACES["second chunk"]
    expected = seen_by_theirs(function, 2, PADDINGS["right"], **places)
    found = mask(batch_size=2, mask_function=function, attention_mask=PADDINGS["right"], **places)
    assert torch.equal(seen_by(found), expected)


def test_padding_of_ones_is_none():
    """Then layouts are the same for the whole batch."""
    ones = torch.ones((2, 17), dtype=torch.bool)
    found = mask(
        batch_size=2,
        mask_function=made.causal_mask_function,
        attention_mask=ones,
        **PLACES["all"],
    )
    assert found.key_padding is None


def test_an_offset_is_copy():
    """A static cache moves its counter on between mask and attention."""
    counter = torch.tensor(7)
    found = mask(
        batch_size=1,
        q_length=2,
        kv_length=20,
        q_offset=counter,
        mask_function=made.causal_mask_function,
    )
    counter.add_(2)
    assert int(found.query_offset) == 7


def test_mask_is_asked_again():
    """``generate`` hands masks that it made in advance to the model, which asks for its own."""
    given = {"batch_size": 2, "mask_function": FUNCTIONS["sliding"], **PLACES["sliding"]}
    first = mask(**given, attention_mask=PADDINGS["left"])
    assert first.contiguous() is first and first.ndim == 4
    assert torch.equal(seen_by(mask(**given, attention_mask=first)), seen_by(first))


def test_size_follows_the_batch():
    """A million tokens: a mask of every pair would have 10^12 entries."""
    tokens = 1_000_000
    held = torch.ones((2, tokens), dtype=torch.bool)
    held[1, :1000] = False
    found = mask(
        batch_size=2,
        q_length=tokens,
        kv_length=tokens,
        attention_mask=held,
        mask_function=FUNCTIONS["sliding"],
    )
    assert found.key_padding.tolist() == [[0, tokens], [1000, tokens]]
    assert found.pattern == "window(4, 0) & causal"
