"""Layouts as torch's BlockMask: every position, every block, and FlexAttention on the CPU."""

import numpy
import pytest

import longspan

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

#: torch warns of its own ways: `vmap` of Python loops, compiled regions, C++ flags.
pytestmark = pytest.mark.filterwarnings("default")

LISTS = ("kv", "full_kv", "q", "full_q")


class Case:
    """A pattern and the places it is compiled for."""

    def __init__(self, pattern, tokens_q=70, tokens_k=None, entries=None, **places):
        self.pattern = longspan.Pattern(pattern)
        self.entries = entries and [longspan.Pattern(entry) for entry in entries]
        self.tokens_q, self.tokens_k = tokens_q, tokens_k or tokens_q
        self.places = places
        self.key_padding = places.get("key_padding")
        self.batch = len(self.key_padding or [0]) if self.pattern.batch is None else self.pattern.batch

    def layout(self, block=16):
        return self.pattern.compile(self.tokens_q, self.tokens_k, block=block, **self.places)

    def truth(self):
        """Every pair by ``Pattern.allows``: (batch, heads, queries, keys)."""
        first_k = self.places.get("key_offset", 0)
        first_q = self.places.get("query_offset", first_k + self.tokens_k - self.tokens_q)
        heads = [None] if self.pattern.heads is None else range(self.pattern.heads)
        ranges = self.key_padding or [(0, self.tokens_k)] * self.batch
        entries = self.entries or [self.pattern] * self.batch
        return numpy.array(
            [
                [
                    [
                        [
                            first <= j < end
                            and entry.allows(i + first_q, j + first_k, head=head)
                            for j in range(self.tokens_k)
                        ]
                        for i in range(self.tokens_q)
                    ]
                    for head in heads
                ]
                for entry, (first, end) in zip(entries, ranges, strict=True)
            ]
        )

    def __repr__(self):
        places = "".join(f", {name}={value}" for name, value in self.places.items())
        return f"{self.pattern}, {self.tokens_q} x {self.tokens_k}{places}"[:100]


MANY = "blocks(4, [[0], [], [0, 2, 4, 6, 8, 10, 12, 14, 16], [3..9, 15], [0..18]])"
CASES = [
    Case("full"),
    Case("!full"),
    Case("causal"),
    Case("causal", 30, 75),
    Case("causal", 75, 30),
    Case("causal", 64),
    Case("window(9, 3)"),
    Case("window(9, 3)", 40, 90, query_offset=-7, key_offset=-20),
    Case("window(2305843009213693952, 0)"),
    Case("sinks(5)"),
    Case("sinks(5)", key_offset=-3, query_offset=0),
    Case("sinks(2305843009213693952)", key_offset=-3, query_offset=0),
    Case("global_tokens(6)"),
    Case("global_tokens(6)", query_offset=-9, key_offset=-4),
    Case("keys(7, 20) | queries(11, 13)"),
    Case("keys(0, 2305843009213693952) & queries(3, 9)", query_offset=-9, key_offset=-4),
    Case("neighborhood([8, 9], [2, 1])"),
    Case("neighborhood([3, 4, 5], [1, 0, 2])", query_offset=-9, key_offset=-4),
    Case("dilated(24, 3, 1)"),
    Case("dilated(24, 3)", query_offset=-30, key_offset=-11),
    Case("dilated(2305843009213693952, 2305843009213693952, 5)"),
    Case("strided(7)"),
    Case("strided(7)", 40, 60, query_offset=-33, key_offset=5),
    Case("strided(2305843009213693952)"),
    Case("hierarchical([(4, 1, 1), (40, 3, 5)])"),
    Case("hierarchical([(4, 1, 1), (40, 3, 5)])", query_offset=-25, key_offset=-22),
    Case("hierarchical([(2305843009213693952, 2, 2305843009213693952)])", key_offset=-9),
    Case("documents([0, 20, 0, 33, 17])"),
    Case("documents([30, 50])", 20, 60, query_offset=-4, key_offset=20),
    Case("documents([30, 50])", 20, 90, query_offset=75, key_offset=-10),
    Case("packed([10, 0, 30], [25, 3, 42], causal & (window(5, 0) | sinks(2)))", 40, 70),
    Case("packed([35, 35], [35, 35], documents([5, 30]) & !strided(3))"),
    Case("packed([20, 20], [35, 35], packed([5, 15], [10, 25], strided(2)))", 40, 70),
    Case("packed([20, 20], [30, 30], dilated(8, 2))", 40, 70, query_offset=20, key_offset=-10),
    Case("packed([20, 20], [35, 35], random(4, 2, 12, 5) | blocks(8, [[0], [2]]))", 40, 70),
    Case("blocks_dilated(8, [1, 4])"),
    Case("blocks_dilated(8, [3])", query_offset=-13, key_offset=-30),
    Case("butterfly(4)"),
    Case("butterfly(4)", query_offset=-6, key_offset=-10),
    Case("random(8, 3, 9, 7)"),
    Case("random(8, 3, 9, 7)", query_offset=-13, key_offset=-30),
    Case("random(2, 20, 30, 1)"),
    Case("random(2, 20, 30, 1)", query_offset=-5, key_offset=-70),
    Case("random(8, 3, 9, 7)", query_offset=1000, key_offset=2000),
    Case("blocks(16, [[0], [0..2], [0, 2], [], [1..5]])"),
    Case(MANY),
    Case(MANY, query_offset=-3, key_offset=5),
    Case("causal & (window(9, 0) | sinks(3))"),
    Case("!(causal & !strided(3)) | sinks(2) & !window(4, 4)"),
    Case("causal & !random(4, 3, 18, 2) & !documents([30, 40])"),
    Case("causal", query_offset=1 << 40, key_offset=(1 << 40) - 20),
    Case("strided(5) & dilated(24, 3, 1)", query_offset=1 << 40, key_offset=(1 << 40) - 20),
    Case("butterfly(4) | random(4, 2, 9, 3)", query_offset=1 << 33, key_offset=1 << 33),
    Case("heads([causal, window(5, 5), causal, sinks(3) | strided(4)])"),
    Case("heads([causal, causal])"),
    Case("causal", key_padding=[(0, 70), (13, 70), (0, 0), (20, 41)]),
    Case("causal", key_padding=[(13, 60)]),
    Case("heads([causal, window(5, 5)])", 40, 70, key_padding=[(0, 70), (13, 70), (5, 50)]),
    Case("full", 64, key_padding=[(0, 64), (16, 64)]),
    Case("batch([causal, full, causal])", entries=["causal", "full", "causal"]),
    Case(
        "batch([heads([causal, window(5, 5)]), heads([sinks(3), full])])",
        entries=["heads([causal, window(5, 5)])", "heads([sinks(3), full])"],
        key_padding=[(0, 70), (13, 60)],
    ),
]


def positions(mask, case):
    """``mask_mod`` at every pair, by broadcasting."""
    batch, heads = case.batch, case.pattern.heads or 1
    b, h, q, k = (
        torch.arange(n, dtype=torch.int32).reshape([-1 if axis == i else 1 for i in range(4)])
        for axis, n in enumerate((batch, heads, case.tokens_q, case.tokens_k))
    )
    return mask.mask_mod(b, h, q, k).expand(batch, heads, case.tokens_q, case.tokens_k).numpy()


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_mask_mod_is_the_pattern_at_every_position(case):
    mask = case.layout().to_block_mask()
    numpy.testing.assert_array_equal(positions(mask, case), case.truth())


def lists(mask, name):
    """The blocks of each line, as many as are counted."""
    counts, indices = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
    assert counts.dtype == indices.dtype == torch.int32
    assert counts.is_contiguous() and indices.is_contiguous()
    assert counts.shape == indices.shape[:3]
    flat = zip(counts.reshape(-1).tolist(), indices.reshape(-1, indices.shape[-1]).tolist())
    return [tuple(row[:count]) for count, row in flat]


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("block", [16, 32])
def test_blocks_are_those_of_create_block_mask(case, block):
    ours = case.layout(block).to_block_mask()
    batch, heads = case.batch, case.pattern.heads or 1
    theirs = flex.create_block_mask(
        ours.mask_mod, batch, heads, case.tokens_q, case.tokens_k, "cpu", block
    )
    assert ours.shape == theirs.shape and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in LISTS:
        assert lists(ours, name) == lists(theirs, name), name
        for part in ("num_blocks", "indices"):
            shapes = [getattr(mask, f"{name}_{part}").shape for mask in (ours, theirs)]
            assert shapes[0] == shapes[1], (name, part)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_narrow_lists_say_the_same(case):
    wide, narrow = (case.layout().to_block_mask(width=width) for width in ("all", "longest"))
    for name in LISTS:
        assert lists(wide, name) == lists(narrow, name)
        longest = max(map(len, lists(narrow, name)), default=0)
        assert getattr(narrow, f"{name}_indices").shape[-1] == max(longest, 1)


def test_all_kinds_of_blocks_occur():
    """The cases have full and partial blocks, and rows without any, or they would show little."""
    seen = set()
    for case in CASES:
        mask = case.layout().to_block_mask()
        for name in LISTS:
            seen |= {(name, bool(row)) for row in lists(mask, name)}
    assert seen == {(name, some) for name in LISTS for some in (False, True)}


def test_other_devices_get_the_same_lists():
    pattern = longspan.Pattern("causal & window(40, 0)")
    there = pattern.to_block_mask(200, 300, block=32, device="meta")
    here = pattern.to_block_mask(200, 300, block=32)
    for name in LISTS:
        for part in ("num_blocks", "indices"):
            tensor = getattr(there, f"{name}_{part}")
            assert tensor.device.type == "meta"
            assert tensor.shape == getattr(here, f"{name}_{part}").shape
    narrow = pattern.to_block_mask(200, 300, block=32, device="meta", width="longest")
    assert narrow.kv_indices.shape[-1] < here.kv_indices.shape[-1]


def test_widened_lists_have_zeros_behind_them():
    from longspan.block_mask import widened

    indices = torch.arange(6, dtype=torch.int32).reshape(1, 1, 2, 3)
    assert widened(indices, 5).tolist() == [[[[0, 1, 2, 0, 0], [3, 4, 5, 0, 0]]]]


def test_pattern_and_layout_agree():
    pattern = longspan.Pattern("causal & window(300, 0)")
    direct = pattern.to_block_mask(1000, 1200, query_offset=7, key_padding=[(5, 1200), (0, 900)])
    layout = pattern.compile(
        1000, 1200, block=128, query_offset=7, key_padding=[(5, 1200), (0, 900)]
    )
    by_layout = layout.to_block_mask("cpu")
    assert direct.BLOCK_SIZE == (128, 128)
    for name in LISTS:
        assert lists(direct, name) == lists(by_layout, name)


def test_nothing_to_see():
    mask = longspan.causal().to_block_mask(0, 0)
    assert mask.kv_num_blocks.shape == (1, 1, 0)
    with pytest.raises(ValueError, match="no batch entries"):
        longspan.causal().to_block_mask(100, key_padding=[])


def test_refused():
    layout = longspan.causal().compile(100)
    with pytest.raises(ValueError, match='width is "wide", expected "all"'):
        layout.to_block_mask(width="wide")
    with pytest.raises(ValueError, match="nearest legal size is 256"):
        longspan.causal().to_block_mask(1000, block=512)
    with pytest.raises(RuntimeError, match="device"):
        layout.to_block_mask("nowhere")


def agrees(case, block, compiled, rng):
    """FlexAttention on the mask against Longspan on the pattern."""
    batch, heads = len(case.key_padding or [0, 0]), case.pattern.heads or 2
    shapes = [(batch, heads, n, 32) for n in (case.tokens_q, case.tokens_k, case.tokens_k)]
    q, k, v = (torch.from_numpy(rng.standard_normal(s, dtype="float32")) for s in shapes)
    mask = case.layout(block).to_block_mask()
    theirs = compiled(q, k, v, block_mask=mask).numpy()
    ours = longspan.attention(q.numpy(), k.numpy(), v.numpy(), case.pattern, **case.places)
    # Both round to f32 on the way, over at most 700 keys: 2^-24 by a few dozen, as oracle.py has it.
    numpy.testing.assert_allclose(theirs, ours, rtol=0, atol=64 * 2.0**-24 * abs(v.numpy()).max())
    # A mask that was left out would be seen.
    open_mask = longspan.attention(q.numpy(), k.numpy(), v.numpy(), "full")
    assert abs(theirs - open_mask).max() > 0.1


FORWARD = [
    # The same closures with other numbers: what was compiled for the first isn't for the second.
    (Case("causal & (window(100, 0) | sinks(5))", 500), 64),
    (Case("causal & (window(31, 0) | sinks(20))", 500), 64),
    (Case("packed([200, 100], [400, 300], causal & strided(3) | dilated(64, 2))", 300, 700), 128),
    (
        Case(
            "heads([causal, random(32, 4, 20, 3) | window(0, 0)])",
            500,
            key_padding=[(0, 500), (0, 390)],
        ),
        128,
    ),
]


def test_flex_attention_on_the_cpu(rng):
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention)
    for case, block in FORWARD:
        agrees(case, block, compiled, rng)
