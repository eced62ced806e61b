"""Masks as programs: what they say at every position, and which of them share a source."""

import math

import numpy
import pytest

import longspan

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

from longspan._mask_mod import functions, program  # noqa: E402
from test_block_mask import CASES  # noqa: E402

PADDING = 256
TEXTS = [str(case.pattern) for case in CASES if case.pattern.heads is None and case.pattern.batch is None]


def positions(progressions):
    return numpy.concatenate([start + step * numpy.arange(n) for start, step, n in progressions])


def tokens_of(axis, tokens):
    if tokens is None:
        return axis
    return axis[tokens[0] : tokens[0] + tokens[1]] if isinstance(tokens, tuple) else axis[tokens]


def evaluated(function, made, *sizes):
    """A function of a program over all entries, heads, queries and keys, also a block past their ends."""
    grids = [
        torch.arange(n + (PADDING - 1 if axis > 1 else 0), dtype=torch.int32).reshape(
            [-1 if axis == i else 1 for i in range(4)]
        )
        for axis, n in enumerate(sizes)
    ]
    tensors = [torch.from_numpy(array) for array in (made.numbers, *made.tables)]
    values = function(*grids, *tensors).expand([grid.numel() for grid in grids])
    return values[:, :, : sizes[2], : sizes[3]].numpy()


def check(masks, query_tokens=None, key_tokens=None):
    """The program of masks against ``Pattern.allows``, twice as many entries of a batch as masks have."""
    texts, choice, q, k, valid = masks
    made = program(masks, query_tokens, key_tokens)
    patterns = [longspan.Pattern(text) for text in texts]
    entries, heads = numpy.shape(choice)
    axes = [
        [tokens_of(positions(each), tokens) for each in axis]
        for axis, tokens in ((q, query_tokens), (k, key_tokens))
    ]
    entries = max(entries, len(q), len(k), len(valid or ()))
    shape = (entries, heads, len(axes[0][0]), len(axes[1][0]))
    truth = numpy.zeros(shape, dtype=bool)
    for entry in range(entries):
        q_at, k_at = (axis[entry % len(axis)].tolist() for axis in axes)
        first, end = (valid or [None])[entry % len(valid or [None])] or (-math.inf, math.inf)
        for head in range(heads):
            allows = patterns[choice[entry % len(choice)][head]].allows
            truth[entry, head] = [[first <= j < end and allows(i, j) for j in k_at] for i in q_at]
    # Two segments-fastest repetitions: the batch of a call of segments.
    found = evaluated(functions(made.source).mask, made, 2 * entries, *shape[1:])
    numpy.testing.assert_array_equal(found, numpy.concatenate([truth, truth]))
    return truth


PLACES = [
    # Views with a step, as components and `Dilated` make them.
    ([[(2, 3, 23)]], [[(1, 2, 34)]], None, None),
    ([[(-8, 3, 23)]], [[(-5, 7, 12)]], None, None),
    # Entries are segments: starts differ.
    (
        [[(0, 2, 12)], [(24, 2, 12)], [(48, 2, 12)]],
        [[(1, 2, 11)], [(25, 2, 11)], [(47, 2, 11)]],
        None,
        None,
    ),
    ([[(0, 1, 12)], [(33, 1, 12)]], [[(3, 5, 11)], [(10, 4, 11)]], None, None),
    # Positions are tables: shards of a ring, gathered keys.
    ([[(0, 1, 9), (61, 1, 9)]], [[(5, 1, 4), (40, 2, 7), (12, 1, 1)]], None, None),
    ([[(0, 1, 9), (61, 1, 9)], [(20, 2, 18)]], [[(0, 1, 16)], [(3, 1, 4), (50, 1, 12)]], None, None),
    # Parts of a call.
    ([[(2, 3, 23)]], [[(1, 2, 34)]], (3, 16), numpy.array([0, 1, 2, 3, 30, 31, 32, 33])),
    ([[(0, 1, 64)], [(6, 1, 64)]], [[(0, 1, 40), (60, 1, 8)]], numpy.array([0, 1, 40, 41]), (30, 18)),
    ([[(0, 1, 70)]], [[(0, 1, 70)]], (69, 1), (0, 64)),
]


@pytest.mark.parametrize("text", TEXTS)
def test_programs_say_what_patterns_allow(text):
    truth = [check(([text], [[0]], q, k, None), *tokens) for q, k, *tokens in PLACES]
    pairs = sum(each.size for each in truth)
    active = sum(int(each.sum()) for each in truth)
    assert 0 < active < pairs or text in ("full", "!full") or "2305843" in text


def test_positions_beyond_32_bits():
    far = 1 << 40
    q, k = [[(far, 3, 20)], [(far - 9, 5, 20)]], [[(far - 30, 2, 9), (far, 1, 12)]]
    for text in ("causal & (window(9, 0) | strided(7))", "random(4, 2, 1000000000000, 3) | sinks(4)"):
        made = program(([text], [[0]], q, k, None))
        assert made.numbers.dtype == made.tables[0].dtype == "int64"
        check(([text], [[0]], q, k, None))


WINDOWS = ["window(9, 0)", "causal & strided(3)", "window(30, 2)", "!documents([20, 40])", "full"]


@pytest.mark.parametrize(
    "choice",
    [
        [[0, 2]],
        [[0], [2], [0]],
        [[0, 1, 2, 0], [3, 2, 0, 1], [2, 2, 4, 4]],
        [[1, 1], [3, 3], [1, 1]],
    ],
)
@pytest.mark.parametrize("padding", [None, [(3, 50)], [(0, 20), None, (30, 31)]])
def test_entries_and_heads(choice, padding):
    for q, k in (
        ([[(0, 1, 40)]], [[(0, 1, 60)]]),
        ([[(20 * i, 2, 10)] for i in range(3)], [[(20 * i, 2, 10), (5, 1, 4)] for i in range(3)]),
    ):
        check((WINDOWS, choice, q, k, padding))


def whole(texts, choice=None, q=((0, 1, 300),), k=((0, 1, 300),), valid=None):
    return program((texts, choice or [[0]], [list(q)], [list(k)], valid))


def sources(programs):
    return {made.source for made in programs}


def packing(rng, tokens=300):
    """Documents of random lengths, as many as it takes."""
    ends = numpy.unique(rng.integers(1, tokens, size=rng.integers(1, 40)))
    return numpy.diff(numpy.concatenate([[0], ends, [tokens]])).tolist()


def test_numbers_are_not_in_the_source(rng):
    same = [
        [
            whole(["causal & (window(90, 0) | sinks(4))"], q=[(offset, 1, 300)])
            for offset in range(0, 1200, 100)
        ],
        [whole([f"causal & window({left}, 0)"]) for left in (0, 1, 5, 300, 1 << 60)],
        [whole(["causal"], q=[(0, 1, n)], k=[(0, 1, n)]) for n in (1, 2, 77, 1000)],
        [whole([f"strided({n}) & dilated({9 * n}, {n}, {n - 1})"], q=[(7, n, 20)]) for n in (2, 3, 50)],
        [whole([f"neighborhood([{n}, 7], [1, {n}])"]) for n in (1, 2, 30)],
        [whole([f"random({block}, 3, {80 // block}, {seed})"]) for block in (1, 4, 16) for seed in range(3)],
        [whole(["causal"], valid=[valid]) for valid in ((0, 300), (17, 20), (5, 5))],
        [whole(["causal"], q=[(3, 1, n), (90, 1, 40), (5, 2, 2)]) for n in (1, 10)],
    ]
    lengths = [packing(rng) for _ in range(50)]
    assert len({len(each) for each in lengths}) > 10
    same.append([whole([f"documents({each}) & causal"]) for each in lengths])
    same.append([whole([f"packed({each}, {each}, causal & window(20, 0))"]) for each in lengths])
    same.append(
        [
            whole([f"packed({q}, {k}, causal)"], q=[(9, 1, 300)])
            for q, k in (([100, 200], [150, 200]), ([1, 2, 3], [0, 2, 1]))
        ]
    )
    # Batches of different packings, and heads of different windows: also of different numbers of them.
    same.append(
        [
            whole([f"documents({each})" for each in lengths[first:end]], [[i] for i in range(end - first)])
            for first, end in ((0, 2), (2, 5), (5, 35))
        ]
    )
    same.append(
        [
            whole([f"window({9 * i}, 0) & causal" for i in range(heads)], [list(range(heads))])
            for heads in (2, 3, 30)
        ]
    )
    # Alternatives in another order.
    same.append([whole(["causal", "window(3, 0)"], [choice]) for choice in ([0, 1], [1, 0], [1, 1, 0])])
    for programs in same:
        assert len(sources(programs)) == 1, sources(programs)
    assert len({programs[0].source for programs in same[:5]}) == 5


def test_programs_have_one_table_and_no_sizes_below_two():
    for made in (whole(["full"]), whole(["causal"]), whole(["causal", "full"], [[0, 1]])):
        assert len(made.tables) <= 1
        assert all(len(array) >= 2 for array in (made.numbers, *made.tables))


def distance(texts, choice, q, k):
    made = program((texts, choice, q, k, None))
    sizes = (len(choice), len(choice[0]), len(positions(q[0])), len(positions(k[0])))
    return evaluated(functions(made.source).distance, made, *sizes)


def test_distance_is_of_positions():
    q, k = [[(100, 3, 20)]], [[(5, 1, 30), (80, 2, 10)]]
    expected = positions(q[0])[:, None] - positions(k[0])
    for text in ("causal", "!documents([9, 50]) | sinks(3)"):
        numpy.testing.assert_array_equal(distance([text], [[0]], q, k)[0, 0], expected)


def test_distance_is_within_sequences_of_packed():
    # Keys 0..40, 40..70; queries are the last 50 positions: 20..40 and 40..70 of keys.
    packed = "packed([20, 30], [40, 30], causal)"
    q, k = [[(20, 1, 50)]], [[(0, 1, 70)]]
    local_q = numpy.concatenate([numpy.arange(20, 40), numpy.arange(30)])
    local_k = numpy.concatenate([numpy.arange(40), numpy.arange(30)])
    within = local_q[:, None] - local_k
    for text in (packed, f"{packed} & window(9, 9)", f"{packed} | packed([20, 30], [40, 30], sinks(2))"):
        numpy.testing.assert_array_equal(distance([text], [[0]], q, k)[0, 0], within)
    # Heads with positions of their own.
    found = distance([packed, "causal"], [[0, 1, 0]], q, k)[0]
    numpy.testing.assert_array_equal(found[0], within)
    numpy.testing.assert_array_equal(found[1], numpy.arange(20, 70)[:, None] - numpy.arange(70))
    numpy.testing.assert_array_equal(found[2], within)


@pytest.mark.parametrize(
    "text",
    [
        "packed([4], [4], causal) | sinks(1)",
        "!packed([4], [4], causal)",
        "packed([4], [4], causal) & packed([1, 3], [1, 3], causal)",
        "packed([4], [4], packed([2, 2], [2, 2], full))",
    ],
)
def test_no_distance_where_parts_use_different_positions(text):
    assert functions(whole([text]).source).distance is None
    with pytest.raises(ValueError, match="counts positions within sequences in one part"):
        ones = numpy.ones((1, 1, 4, 4), "float32")
        longspan.attention(ones, ones, ones, longspan.Pattern(text), alibi_slopes=numpy.ones(1, "float32"))


def test_masks_of_other_numbers_share_a_compilation():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(flex.flex_attention, backend=counter)
    q = torch.randn(1, 2, 128, 32)
    for offset in range(0, 12 * 128, 128):
        pattern = longspan.Pattern(f"causal & window({64 + offset}, 0)")
        layout = pattern.compile(128, 128, block=128, query_offset=offset, key_offset=0)
        compiled(q, q, q, block_mask=layout.to_block_mask())
    assert counter.frame_count == 1
    torch._dynamo.reset()
    counter.frame_count = 0
    rng = numpy.random.default_rng(0)
    for _ in range(12):
        lengths = packing(rng, 128)
        layout = longspan.Pattern(f"documents({lengths}) & causal").compile(128, 128, block=128)
        compiled(q, q, q, block_mask=layout.to_block_mask())
    assert counter.frame_count == 1
