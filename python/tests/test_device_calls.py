"""Calls for engines on devices: every pair is computed once, by blocks and masks that are expanded here."""

import functools
import itertools

import numpy
import pytest

import longspan
from longspan._longspan import device_calls


@functools.cache
def allowed(text, q_positions, k_positions, valid):
    """The pairs of a pattern's text at positions, one by one."""
    pattern = longspan.Pattern(text)
    first, end = valid or (-(1 << 62), 1 << 62)
    return numpy.array(
        [[first <= k < end and pattern.allows(q, k) for k in k_positions] for q in q_positions],
        dtype=bool,
    ).reshape(len(q_positions), len(k_positions))


def positions(progressions):
    return tuple(start + step * i for start, step, count in progressions for i in range(count))


def indices(steps):
    first, step, count = steps
    return first + step * numpy.arange(count)


def listed(counts, numbers, across):
    """Lists of blocks as a matrix, with nothing behind the blocks of a line."""
    blocks = numpy.zeros((*counts.shape, across), dtype=bool)
    for line in numpy.ndindex(counts.shape):
        count, own = counts[line], numbers[line]
        assert (own[count:] == 0).all() and (numpy.diff(own[:count]) > 0).all()
        assert count == 0 or own[count - 1] < across
        blocks[line][own[:count]] = True
    return blocks


def grids(part, rows, columns):
    """Partial and full blocks ``[entries, heads, rows, columns]``, the same from rows and columns."""
    assert [numbers.dtype for numbers in part.lists] == [numpy.int32] * 8
    assert all(min(numbers.shape[2:]) >= 2 for numbers in part.lists)
    lists = [part.lists[at : at + 2] for at in range(0, 8, 2)]
    of_rows = [listed(*pair, max(columns, 2)) for pair in lists[:2]]
    of_columns = [listed(*pair, max(rows, 2)).swapaxes(2, 3) for pair in lists[2:]]
    for by_row, by_column in zip(of_rows, of_columns, strict=True):
        assert by_row.shape[2:] == by_column.shape[2:] == (max(rows, 2), max(columns, 2))
        numpy.testing.assert_array_equal(by_row, by_column)
        assert not by_row[:, :, rows:].any() and not by_row[..., columns:].any()
    assert not (of_rows[0] & of_rows[1]).any()
    return [blocks[:, :, :rows, :columns] for blocks in of_rows]


def chosen(tokens, count):
    """The tokens of a part."""
    if tokens is None:
        return numpy.arange(count)
    if isinstance(tokens, tuple):
        return tokens[0] + numpy.arange(tokens[1])
    assert tokens.dtype == numpy.int64
    return tokens


def widened(blocks, block, queries, keys):
    return blocks.repeat(block, axis=0).repeat(block, axis=1)[:queries, :keys]


def computed(calls, batch, heads, key_heads, queries, keys, long_lists=1 << 20, exact=True):
    """How often each pair is computed: ``[batch, heads, queries, keys]``. ``exact``: blocks that are in no
    list have no pairs, which isn't so where only some blocks of a pattern are chosen."""
    times = numpy.zeros((batch, heads, queries, keys), dtype=int)
    for call in calls:
        patterns, choice, q_positions, k_positions, valid = call.masks
        entries, block = len(q_positions), call.block
        assert len(k_positions) in (1, entries) and (valid is None or len(valid) in (1, entries))
        choice = numpy.array(choice).reshape(entries, -1)
        (q_segments, q_tokens, q_heads), (k_segments, k_tokens, k_heads) = call.queries, call.keys
        segments, calls_heads = q_segments[2], q_heads[2]
        assert k_segments[2] == segments and calls_heads % k_heads[2] == 0
        assert choice.shape[1] in (1, calls_heads)
        for head, tensor_head in enumerate(indices(q_heads)):
            key_head = indices(k_heads)[head // (calls_heads // k_heads[2])]
            assert key_head == tensor_head // (heads // key_heads)
        own = range(batch) if call.entry is None else [call.entry]
        assert entries in (1, segments, len(own))
        if call.whole:
            assert (call.queries, call.keys, call.entry) == (
                ((0, 1, 1), (0, 1, queries), (0, 1, heads)),
                ((0, 1, 1), (0, 1, keys), (0, 1, key_heads)),
                None,
            )
        masks = numpy.array(
            [
                [
                    allowed(
                        patterns[number],
                        positions(q_positions[entry]),
                        positions(k_positions[entry % len(k_positions)]),
                        valid and valid[entry % len(valid)],
                    )
                    for number in choice[entry]
                ]
                for entry in range(entries)
            ]
        )
        assert masks.shape[2:] == (q_tokens[2], k_tokens[2])
        covered = numpy.zeros((entries, calls_heads, *masks.shape[2:]), dtype=bool)
        active = numpy.zeros_like(covered)
        parts = call.parts(long_lists)
        for part in parts:
            q_own = chosen(part.query_tokens, q_tokens[2])
            k_own = chosen(part.key_tokens, k_tokens[2])
            rows, columns = -(-len(q_own) // block), -(-len(k_own) // block)
            partial, full = grids(part, rows, columns)
            for entry, head in itertools.product(range(entries), range(calls_heads)):
                at = (entry % len(partial), head % partial.shape[1])
                in_part, in_full = (
                    widened(kind[at], block, len(q_own), len(k_own)) for kind in (partial, full)
                )
                mask = masks[entry, head % masks.shape[1]][numpy.ix_(q_own, k_own)]
                # A kernel reads no mask of a full block, and takes it for one of all its tokens.
                assert mask[in_full].all()
                assert not full[at][len(q_own) // block :].any()
                assert not full[at][:, len(k_own) // block :].any()
                box = numpy.ix_([entry], [head], q_own, k_own)
                assert not (covered[box] & (in_part | in_full)).any()
                covered[box] |= in_part | in_full
                active[box] |= in_full | in_part & mask
        if exact:
            assert not (masks & ~covered).any()
        for at, entry in enumerate(own):
            for segment in range(segments):
                z = (at * segments + segment) % entries
                to = numpy.ix_(
                    [entry],
                    indices(q_heads),
                    indices(q_segments)[segment] + indices(q_tokens),
                    indices(k_segments)[segment] + indices(k_tokens),
                )
                times[to] += active[z]
    return times


class Case:
    """A pattern, what it is for, and the places that it is compiled for."""

    def __init__(self, pattern, queries=90, keys=None, batch=1, heads=2, key_heads=1, block=16, entries=None, exact=True, **places):
        self.pattern, self.entries = longspan.Pattern(pattern), entries
        self.sizes = (batch, heads, key_heads)
        self.queries, self.keys = queries, keys or queries
        self.block, self.exact, self.places = block, exact, places

    def layout(self):
        return self.pattern.compile(self.queries, self.keys, block=self.block, **self.places)

    def truth(self):
        batch, heads, _ = self.sizes
        padding = self.places.get("key_padding") or [(0, self.keys)] * batch
        first_k = self.places.get("key_offset", 0)
        first_q = self.places.get("query_offset", first_k + self.keys - self.queries)
        of_q = self.places.get("query_map", range(first_q, first_q + self.queries))
        of_k = self.places.get("key_map", range(first_k, first_k + self.keys))
        entries = [longspan.Pattern(text) for text in self.entries or [str(self.pattern)] * batch]
        head = [None if entry.heads is None else range(entry.heads) for entry in entries]
        seen = [
            [
                [
                    [
                        first <= j - first_k < end
                        and entries[b].allows(i, j, head=head[b] and head[b][h])
                        for j in of_k
                    ]
                    for i in of_q
                ]
                for h in range(heads)
            ]
            for b, (first, end) in zip(range(batch), padding, strict=True)
        ]
        return numpy.array(seen, dtype=int).reshape(batch, heads, len(of_q), len(of_k))

    def __repr__(self):
        return f"{self.pattern}, {self.queries} x {self.keys}, {self.sizes}, {self.places}"[:110]


CASES = [
    Case("full"),
    Case("causal", 64, block=32),
    Case("causal", 30, 97, heads=4, key_heads=2),
    Case("causal", 97, 30),
    Case("!full"),
    Case("causal", 1, 89),
    Case("causal", 89, 1),
    Case("window(9, 3)", 113, query_offset=5, key_offset=-7),
    Case("window(2, 2) & queries(20, 40)", 101),
    Case("strided(7)"),
    Case("causal & (window(5, 0) | strided(8))", 127),
    Case("strided(7) | window(3, 0)", 40, 101, batch=2, query_offset=-13, key_offset=5),
    Case("causal & (dilated(48, 3, 1) | sinks(2))", 101),
    Case("dilated(1024, 3) | dilated(1024, 3, 1)", 1100, heads=1, block=128),
    Case("packed([40, 51], [40, 51], causal & strided(4))", 91),
    Case("packed([20, 30], [40, 51], strided(3) | window(2, 0))", 50, 91),
    Case("documents([30, 0, 61]) & strided(5)", 91),
    Case("heads([causal, strided(6), causal, strided(6) | window(1, 1)])", heads=4, key_heads=2, exact=False),
    Case("heads([strided(6), window(8, 0), strided(6), causal])", heads=4, key_heads=4, exact=False),
    Case("heads([causal, causal])"),
    Case("causal", batch=3, key_padding=[(0, 90), (13, 90), (20, 41)]),
    Case("causal", batch=2, key_padding=[(13, 90), (13, 90)]),
    Case("causal", batch=2, key_padding=[(0, 0), (13, 90)]),
    Case("strided(6) & causal", batch=2, key_padding=[(0, 90), (13, 61)]),
    Case("heads([causal, window(5, 5)])", 40, 90, batch=3, key_padding=[(0, 90), (13, 90), (5, 50)]),
    # Equal pairs under other padding.
    Case("heads([keys(20, 30), causal])", batch=2, key_padding=[(10, 50), (0, 60)]),
    Case(
        "batch([heads([causal, window(5, 5)]), heads([strided(5), full])])",
        batch=2,
        entries=["heads([causal, window(5, 5)])", "heads([strided(5), full])"],
        exact=False,
    ),
    Case(
        "batch([strided(9), causal])", batch=2, entries=["strided(9)", "causal"], exact=False
    ),
    Case("causal & strided(3)", query_map=range(3, 90, 4), key_map=[*range(50, 70), *range(10, 30)]),
    # Wide columns, wide rows, both; adjacent, apart, and the last ones.
    Case("causal & (window(20, 0) | sinks(3))", 333),
    Case("window(9, 9) | global_tokens(5)", 333),
    Case("window(9, 9) | keys(0, 5) | keys(200, 210) | keys(330, 333)", 333, heads=1),
    Case("window(9, 9) | queries(40, 44) | queries(200, 210) | queries(497, 499)", 499, 350, heads=1),
    Case("heads([window(9, 9) | sinks(4), window(5, 5) | keys(150, 160)])", 333, batch=2, key_padding=[(0, 333), (7, 300)]),
    Case("sinks(4) | queries(100, 101)", 331),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("long_lists", [1 << 20, 0])
def test_every_pair_of_a_layout_is_computed_once(case, long_lists):
    layout = case.layout()
    calls = device_calls(layout, *case.sizes)
    times = computed(
        calls, *case.sizes, layout.tokens_q, layout.tokens_k, long_lists=long_lists, exact=case.exact
    )
    numpy.testing.assert_array_equal(times, case.truth())


def test_the_cases_have_all_kinds_of_calls_and_parts():
    """Or they would show little."""
    seen = set()
    for case in CASES:
        for call in device_calls(case.layout(), *case.sizes):
            entries = len(call.masks[2])
            seen.add(("whole", call.whole, "entry", call.entry is not None))
            seen.add(("entries", entries > 1, "heads", len(call.masks[1]) // entries > 1))
            seen.add(("segments", call.queries[0][2] > 1))
            parts = call.parts(0)
            seen.add(("parts", len(parts)))
            for part in parts:
                seen.add(("rows", type(part.query_tokens), "columns", type(part.key_tokens)))
                seen.add(("apart", part.lists[0].shape[0] > 1, part.lists[0].shape[1] > 1))
    kinds = type(None), tuple, numpy.ndarray
    assert seen >= {("rows", kind, "columns", type(None)) for kind in kinds}
    assert seen >= {("rows", type(None), "columns", kind) for kind in kinds}
    assert seen >= {("parts", parts) for parts in (1, 2, 3)}
    assert seen >= {("segments", several) for several in (False, True)}
    both = list(itertools.product((False, True), repeat=2))
    assert seen >= {("entries", entries, "heads", heads) for entries, heads in both}
    assert seen >= {("apart", entries, heads) for entries, heads in both}
    assert {("whole", True, "entry", False), ("whole", False, "entry", True)} <= seen


def test_strides_are_views():
    layout = longspan.Pattern("causal & (window(64, 0) | strided(64))").compile(4096, block=128)
    local, strided = device_calls(layout, 2, 8, 2)
    assert local.whole and not strided.whole
    assert strided.queries == strided.keys[:2] + ((0, 1, 8),)
    assert strided.queries[:2] == ((0, 1, 64), (0, 64, 64)) and strided.keys[2] == (0, 1, 2)
    # All segments have the same blocks.
    assert strided.parts()[0].lists[0].shape == (1, 1, 2)
    # Two of a window's blocks are less than half of the work: it stays one call.
    layout = longspan.Pattern("causal & (window(2000, 0) | strided(2))").compile(4096, block=128)
    assert [call.whole for call in device_calls(layout, 1, 1, 1)] == [True]


def test_lists_of_a_million_tokens_are_short():
    pattern = longspan.Pattern("causal & (window(4096, 0) | sinks(64))")
    (call,) = device_calls(pattern.compile(1 << 20, block=128), 1, 8, 8)
    narrow, wide = call.parts()
    assert (narrow.query_tokens, narrow.key_tokens) == (None, None)
    assert (wide.query_tokens, wide.key_tokens) == (None, (0, 128))
    assert sum(numbers.nbytes for part in (narrow, wide) for numbers in part.lists) < 32 << 20
    # Without sinks there is one part, and likewise where lists are short anyway.
    for text, tokens in [("causal & window(4096, 0)", 1 << 20), (str(pattern), 1 << 14)]:
        (call,) = device_calls(longspan.Pattern(text).compile(tokens, block=128), 1, 8, 8)
        assert len(call.parts()) == 1


def branch_pairs(dilated, head, count, shift):
    """Each branch's pairs in a sequence of ``count`` keys, whose queries begin at ``shift``."""
    q, k = numpy.arange(shift, count)[:, None], numpy.arange(count)[None]
    within = allowed(str(dilated.within), tuple(q[:, 0]), tuple(k[0]), None)
    branches = []
    if dilated.also is not None:
        branches.append(allowed(str(dilated.also), tuple(q[:, 0]), tuple(k[0]), None))
    for segment, rate in zip(dilated.segment_lengths, dilated.dilation_rates, strict=True):
        chosen_q, chosen_k = (x % segment % rate == head % rate for x in (q, k))
        branches.append((q // segment == k // segment) & chosen_q & chosen_k)
    times = sum((within & branch).astype(int) for branch in branches)
    return times if dilated.overlap == "weighted" else times.clip(max=1)


DILATED = [
    (longspan.Dilated([32], [1]), 1, 101, 101),
    (longspan.Dilated([32, 64], [2, 4], within="causal"), 2, 128, 128),
    (longspan.Dilated([24, 50], [3, 7], within="causal & documents([40, 61])"), 1, 101, 101),
    (longspan.Dilated([32, 64], [1, 2], within="causal", also="window(5, 0)"), 1, 97, 97),
    (longspan.Dilated([32, 64], [1, 2], also="window(5, 3)", overlap="union"), 1, 97, 97),
    (longspan.Dilated([32, 64, 128], [1, 2, 4], within="causal", overlap="union"), 1, 41, 97),
    # Segments that are views.
    (longspan.Dilated([600], [2], within="causal"), 1, 1250, 1250),
    (longspan.Dilated([32, 64], [1, 2], within="causal").padded([(0, 97), (9, 60), (5, 5)]), 3, 97, 97),
    (longspan.Dilated([32, 64], [2, 4]).packed_cu_seqlens([0, 30, 30, 97]), 1, 97, 97),
    (longspan.Dilated([16, 64], [1, 4], within="causal").packed_cu_seqlens([0, 20, 50], [0, 37, 97]), 1, 50, 97),
]  # fmt: skip


@pytest.mark.parametrize("dilated, batch, queries, keys", DILATED, ids=str)
def test_every_pair_of_a_branch_is_computed_once(dilated, batch, queries, keys):
    heads, key_heads = 4, 2
    if keys > 1000:
        heads = key_heads = 1
    block = 128 if keys > 1000 else 16
    calls = device_calls(dilated, batch, heads, key_heads, queries, keys, block=block)
    times = computed(calls, batch, heads, key_heads, queries, keys)
    expected = numpy.zeros_like(times)
    for entry, head in numpy.ndindex(batch, heads):
        if dilated.key_padding:
            first, end = dilated.key_padding[entry]
            expected[entry, head, first:end, first:end] = branch_pairs(dilated, head, end - first, 0)
        elif dilated.cu_seqlens:
            for q, q_end, k, k_end in zip(
                *(bounds[at:] for bounds in dilated.cu_seqlens for at in (0, 1)), strict=False
            ):
                shift = k_end - k - (q_end - q)
                expected[entry, head, q:q_end, k:k_end] = branch_pairs(dilated, head, k_end - k, shift)
        else:
            expected[entry, head] = branch_pairs(dilated, head, keys, keys - queries)
    numpy.testing.assert_array_equal(times, expected)


def test_where_the_queries_of_branches_stand():
    dilated = longspan.Dilated([16], [2], within="causal")
    calls = device_calls(dilated, 1, 2, 2, 20, 90, query_offset=7, block=16)
    times = computed(calls, 1, 2, 2, 20, 90)
    for head in range(2):
        numpy.testing.assert_array_equal(times[0, head], branch_pairs(dilated, head, 90, 0)[7:27])


def test_chosen_blocks(rng):
    counts = numpy.array([[[1, 2, 2], [1, 1, 3]]])
    numbers = numpy.array([[[[0, 0, 0], [0, 1, 0], [0, 2, 0]], [[0, 0, 0], [0, 0, 0], [0, 1, 2]]]])
    x = rng.standard_normal((1, 2, 180, 8), dtype="float32")
    layout = longspan.ListedBlocks("causal & !strided(5)", counts, numbers).select(x, x, block=64).layout
    blocks = listed(counts, numbers, 3).repeat(64, axis=2).repeat(64, axis=3)[:, :, :180, :180]
    base = Case("causal & !strided(5)", 180).truth()
    for long_lists in (1 << 20, 0):
        times = computed(
            device_calls(layout, 1, 2, 1), 1, 2, 1, 180, 180, long_lists=long_lists, exact=False
        )
        numpy.testing.assert_array_equal(times, base & blocks)
    # What a selector chooses is never more than its base.
    layout = longspan.BlockSelector("causal", max_blocks=2, dense_below=1).select(x, x, block=16).layout
    times = computed(device_calls(layout, 1, 2, 2), 1, 2, 2, 180, 180, exact=False)
    assert (times <= Case("causal", 180).truth()).all()
    assert times.sum() == layout.active_pairs < Case("causal", 180).truth().sum()


@pytest.mark.parametrize("shape", [(50, 90), (90, 50), (2, 3, 70, 70)])
def test_masks(rng, shape):
    mask = rng.random(shape) < 0.3
    mask[..., :20, :20] = True
    mask[..., 30, :] = False
    layout = longspan.Layout.from_mask(mask, block=16)
    batch, heads = shape[:2] if len(shape) == 4 else (2, 3)
    times = computed(device_calls(layout, batch, heads, 1), batch, heads, 1, *shape[-2:])
    numpy.testing.assert_array_equal(times, numpy.broadcast_to(mask, times.shape))


def test_nothing_to_compute():
    for text, tokens in [("causal", 0), ("!full", 90)]:
        assert device_calls(longspan.Pattern(text).compile(tokens), 1, 2, 2) == []
    assert device_calls(longspan.Dilated([8], [2]), 1, 1, 1, 0, 0) == []
    layout = longspan.causal().compile(90)
    assert [call.whole for call in device_calls(layout, 3, 2, 2)] == [True]


def test_refused():
    layout = longspan.Pattern("heads([causal, full])").compile(90)
    with pytest.raises(ValueError, match="heads"):
        device_calls(layout, 1, 4, 2)
    with pytest.raises(ValueError, match="heads"):
        device_calls(layout, 1, 2, 3)
    with pytest.raises(ValueError, match="a layout has its tokens"):
        device_calls(layout, 1, 2, 2, 90, 90)
    with pytest.raises(ValueError, match="expected both"):
        device_calls(longspan.Dilated([8], [2]), 1, 2, 2)
    with pytest.raises(TypeError, match="a str, expected a Layout or a Dilated"):
        device_calls("causal", 1, 2, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nearest legal size is 256"):
        device_calls(longspan.Dilated([8], [2]), 1, 2, 2, 90, 90, block=512)
    padded = longspan.Dilated([8], [2]).padded([(0, 90)])
    with pytest.raises(ValueError, match="batch"):
        device_calls(padded, 2, 2, 2, 90, 90)
