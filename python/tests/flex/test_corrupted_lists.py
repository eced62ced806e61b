"""Block lists with one thing wrong: all kinds are detected, since kernels read the lists.

FlexAttention outside of a compiled region would pass all of these: it evaluates the mask alone."""

import pytest
import torch
from cases import Case, rule
from interpreter import InterpretedCuda
from operators import TILES
from test_attention import check, run

import longspan.torch
from longspan.torch._engine import in_place_of
from longspan.torch._flex import FlexEngine

pytestmark = pytest.mark.filterwarnings("default")

#: Six rows of blocks of 64: sinks, two Full diagonals, Partial blocks at both edges of the window.
CASE = Case(
    "lists", "causal & (window(200, 0) | sinks(16))",
    rule(lambda q, k: (k <= q) & ((q - k <= 200) | (k < 16))), 1, 1, 384, dim=16,
)

KV, KV_LIST, FULL, FULL_LIST, Q, Q_LIST, FULL_Q, FULL_Q_LIST = range(8)


def longest(lists, counts):
    """A row with the most blocks."""
    return (0, 0, int(lists[counts][0, 0].argmax()))


def dropped(counts):
    def corrupt(lists):
        lists[counts][longest(lists, counts)] -= 1

    return corrupt


def duplicated(counts, indices):
    """In a row with few blocks: kernels read no more than there are."""

    def corrupt(lists):
        row = (0, 0, int(lists[counts][0, 0].masked_fill(lists[counts][0, 0] == 0, 99).argmin()))
        count = int(lists[counts][row])
        lists[indices][(*row, count)] = lists[indices][(*row, count - 1)]
        lists[counts][row] += 1

    return corrupt


def counted_too_far(counts):
    """The room behind a row's blocks has zeros, which is block 0."""

    def corrupt(lists):
        lists[counts][longest(lists, counts)] += 1

    return corrupt


def moved(counts, indices, by):
    def corrupt(lists):
        row = longest(lists, counts)
        lists[indices][(*row, int(lists[counts][row]) - 1)] += by

    return corrupt


def kind_changed(counts, indices, others, other_indices):
    """Partial blocks taken for Full ones."""

    def corrupt(lists):
        row = longest(lists, counts)
        count, other = int(lists[counts][row]), int(lists[others][row])
        lists[other_indices][(*row, other)] = lists[indices][(*row, count - 1)]
        lists[counts][row] -= 1
        lists[others][row] += 1

    return corrupt


KINDS = {
    "a Partial block dropped": dropped(KV),
    "a Full block dropped": dropped(FULL),
    "a Partial block duplicated": duplicated(KV, KV_LIST),
    "a count off by one": counted_too_far(FULL),
    "a block moved": moved(FULL, FULL_LIST, -1),
    "a Partial block taken for Full": kind_changed(KV, KV_LIST, FULL, FULL_LIST),
    "a Partial block missing in the transpose": dropped(Q),
    "a Full block missing in the transpose": dropped(FULL_Q),
    "a block moved in the transpose": moved(Q, Q_LIST, -1),
    "a block duplicated in the transpose": duplicated(Q, Q_LIST),
    "a Partial block taken for Full in the transpose": kind_changed(Q, Q_LIST, FULL_Q, FULL_Q_LIST),
    "rows swapped": lambda lists: [x.__setitem__((0, 0), x[0, 0].flip(0)) for x in lists[:4]],
}


@pytest.fixture(scope="module")
def engine():
    torch.set_num_threads(1)
    return FlexEngine(backend=InterpretedCuda(), dynamic=False, options=dict.fromkeys(TILES, 64))


def results(engine, corrupt):
    calls = type(engine).calls

    def corrupted(q, k, v, what, places):
        (call,) = calls(engine, q, k, v, what, places)
        room = lambda x: torch.nn.functional.pad(x, (0, 2)) if x.ndim == 4 else x
        lists = [room(x).clone() for x in call.lists]
        corrupt(lists)
        return [call._replace(lists=tuple(lists))]

    engine.calls = corrupted
    layout = longspan.Pattern(CASE.pattern).compile(CASE.queries, block=64)
    with in_place_of("cpu", engine):
        return run(CASE, lambda q, k, v, _, **options: longspan.torch.attention(q, k, v, layout, **options))


def test_lists_as_they_are(engine):
    check(CASE, results(engine, lambda lists: None))


@pytest.mark.parametrize("kind", KINDS)
def test_corrupted(engine, kind):
    found = results(engine, KINDS[kind])
    with pytest.raises(AssertionError, match="error .* at most|NaNs|isn't -inf"):
        check(CASE, found)


