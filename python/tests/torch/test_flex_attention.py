"""FlexAttention's call on the CPU: masks of attention-gym's kinds, gradients, what is kept and what is refused."""

import collections
import functools
import itertools
import os
import random
import types

import dense
import numpy
import pytest
import torch

import longspan
from longspan.torch import flex_attention, score_mod

flex = pytest.importorskip("torch.nn.attention.flex_attention")
masks = pytest.importorskip("attn_gym.masks")
if not hasattr(flex, "AuxRequest"):
    pytest.skip("this torch has no AuxRequest", allow_module_level=True)

from longspan.torch import _block_mask_layouts, _captured  # noqa: E402

#: Queries, and keys.
N = 300
GRID = 18  # squared: 324 tokens


def documents(*lengths):
    return masks.generate_doc_mask_mod(masks.causal_mask, torch.tensor([0, *lengths]).cumsum(0).int())


def per_head(b, h, q, k):
    return torch.where(h == 0, k <= q, torch.where(h == 1, (q - k).abs() <= 30, (q - k) % 3 == h))


def per_batch(b, h, q, k):
    return (k <= q) & torch.where(b == 0, k < 250, k >= 33)


def empty_rows(b, h, q, k):
    return (k < q) & (q - k > 100) & (k % 7 != 0)


class Case:
    def __init__(self, mask, queries=N, keys=N, heads=(4, 4), batch=2, listed=(None, None), mod=None, block=128):
        self.mask, self.queries, self.keys, self.heads, self.batch = mask, queries, keys, heads, batch
        self.listed, self.mod, self.block = listed, mod or {}, block

    def block_mask(self):
        if self.listed == "all":
            # Every block in one list for all, which is more than any entry or head has.
            made = flex.create_block_mask(lambda b, h, q, k: q < 0, None, None, self.queries, self.keys, device="cpu")
            rows, columns = made.kv_indices.shape[2:]
            counts = torch.full((1, 1, rows), columns, dtype=torch.int32)
            indices = torch.arange(columns, dtype=torch.int32).expand(1, 1, rows, columns)
            return flex.BlockMask.from_kv_blocks(counts, indices, mask_mod=self.mask, seq_lengths=made.seq_lengths)
        return flex.create_block_mask(
            self.mask, *self.listed, self.queries, self.keys, device="cpu", BLOCK_SIZE=self.block
        )

    def pairs(self):
        """The mask at every position, one by one, as its definition has it."""
        sizes = (self.batch, self.heads[0], self.queries, self.keys)
        return flex.create_mask(self.mask, *sizes, device="cpu").numpy()


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.01])
CASES = {
    "causal": Case(masks.causal_mask),
    "sliding": Case(masks.generate_sliding_window(70)),
    "prefix": Case(masks.generate_prefix_lm_mask(90)),
    "document": Case(documents(100, 1, 150, 49)),
    "softcap": Case(masks.causal_mask, mod={"softcap": 2.0}),
    "ALiBi": Case(masks.causal_mask, 200, 300, mod={"alibi_slopes": SLOPES}),
    "dilated": Case(masks.generate_dilated_sliding_window(40, 4)),
    "natten": Case(masks.generate_natten(GRID, GRID, 5, 5), GRID**2, GRID**2),
    "per head": Case(per_head, listed=(None, 4)),
    "per batch": Case(per_batch, listed=(2, None)),
    "empty rows": Case(empty_rows),
    "GQA": Case(masks.generate_sliding_window(70), 131, 300, heads=(4, 2)),
    # Beyond the twelve kinds.
    "table": Case(masks.causal_mask, 200, 300, mod={"bias_table": torch.linspace(-1, 1, 4 * 65).view(4, 65),
                                                    "bias_right": 32}),
    "global": Case(masks.generate_global_sliding_window(30, torch.arange(N) % 97 == 3)),
    "odd blocks": Case(masks.generate_sliding_window(70), 211, 307, block=(48, 80)),
    "one list, a mask per head": Case(per_head, listed="all"),
    "one list, a mask per entry": Case(per_batch, listed="all"),
}


def inputs(rng, case, dtype=torch.float32):
    (heads, key_heads), dims = case.heads, (32, 24)
    return dense.tensors(rng, (case.batch, heads, key_heads, case.queries, case.keys, *dims), dtype)


def scores(case):
    """How scores change, for ``dense.truth``."""

    class Score:
        @staticmethod
        def torch(x):
            if cap := case.mod.get("softcap"):
                x = cap * torch.tanh(x / cap)
            distance = torch.arange(case.queries)[:, None] - torch.arange(case.keys)
            if (slopes := case.mod.get("alibi_slopes")) is not None:
                x = x - slopes.double()[:, None, None] * distance.abs()
            if (table := case.mod.get("bias_table")) is not None:
                right = case.mod["bias_right"]
                x = x + table.double()[:, (distance + right).clamp(0, table.shape[1] - 1)]
            return x

        @staticmethod
        def numpy(x):
            x = torch.from_numpy(x).requires_grad_()
            y = Score.torch(x)
            return y.detach().numpy(), torch.autograd.grad(y.sum(), x)[0].numpy()

    return Score if case.mod else None


@pytest.mark.parametrize("name", CASES)
def test_against_f64(rng, name):
    case = CASES[name]
    q, k, v, dout = inputs(rng, case)
    mod = score_mod(**case.mod) if case.mod else None
    out, aux = flex_attention(
        q, k, v, mod, case.block_mask(), scale=0.2, enable_gqa=True, return_aux=flex.AuxRequest(lse=True)
    )
    dlse = torch.from_numpy(rng.standard_normal(aux.lse.shape, dtype="float32"))
    live = aux.lse.isfinite()
    gradients = torch.autograd.grad([out, aux.lse.masked_fill(~live, 0)], (q, k, v), [dout, dlse])
    expected = dense.truth(q, k, v, case.pairs(), dout, dlse, scale=0.2, score=scores(case))
    dense.check(dict(zip(("dq", "dk", "dv"), gradients), out=out, lse=aux.lse), expected)
    if name == "empty rows":
        assert not live.all() and out[~live].eq(0).all() and aux.max_scores is None


#: torch compiles each mask with a C++ compiler, in some ten seconds: all with LONGSPAN_FLEX=all.
COMPILED = list(CASES)[:12] if os.environ.get("LONGSPAN_FLEX") == "all" else ["document", "per head", "GQA"]


@pytest.mark.parametrize("name", COMPILED)
def test_against_torchs_compiled(rng, name, compiled_flex):
    case = CASES[name]
    # torch's kernel for the CPU has values as wide as keys.
    q, k, v, _ = (x.detach() for x in dense.tensors(rng, (case.batch, *case.heads, case.queries, case.keys, 32, 32)))
    mod, mask = score_mod(**case.mod) if case.mod else None, case.block_mask()
    ours = flex_attention(q, k, v, mod, mask, enable_gqa=True)
    theirs = compiled_flex(q, k, v, mod, mask, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.fixture(scope="module")
def compiled_flex():
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention)
    with torch._dynamo.config.patch(recompile_limit=64):
        yield compiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types(rng, dtype):
    case = CASES["document"]
    q, k, v, dout = inputs(rng, case, dtype)
    out = flex_attention(q, k, v, block_mask=case.block_mask())
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    expected = dense.truth(q, k, v, case.pairs(), dout)
    dense.check(dict(zip(("dq", "dk", "dv"), gradients), out=out), expected, dtype)


def test_slopes_and_tables_have_gradients(rng):
    case = CASES["causal"]
    q, k, v, dout = inputs(rng, case)
    learned = [SLOPES.clone().requires_grad_(), torch.zeros(4, 65, requires_grad=True)]
    mod = score_mod(alibi_slopes=learned[0], bias_table=learned[1], bias_right=10)
    mask = case.block_mask()
    ours = torch.autograd.grad(flex_attention(q, k, v, mod, mask), learned, dout)
    wide = [x.detach().double() for x in (q, k, v)]
    at = torch.arange(N)
    pairs = [mod(torch.zeros((), dtype=torch.float64), None, h, at[:, None], at) for h in range(4)]
    logits = wide[0] @ wide[1].mT / 32**0.5 + torch.stack(pairs)
    p = logits.masked_fill(at[:, None] < at, -torch.inf).softmax(-1)
    expected = torch.autograd.grad(p @ wide[2], learned, dout.double())
    for a, b in zip(ours, expected, strict=True):
        # Sums over the batch and the queries, which cancel: of the size of the largest.
        torch.testing.assert_close(a, b.float(), rtol=0, atol=2e-6 * float(b.abs().max()) * 100)


def test_block_masks_of_layouts_come_back(rng):
    """A BlockMask that Longspan made is the layout that it was made from, whatever room its lists have."""
    pattern = longspan.Pattern("heads([causal & window(50, 0), strided(5) | sinks(3)])")
    for width in ("all", "longest"):
        mask = pattern.to_block_mask(333, 400, width=width, query_offset=0)
        layout = _block_mask_layouts.layout_of(mask, (1, 2), (333, 400))
        assert layout == pattern.compile(333, 400, query_offset=0)
    again = layout.to_block_mask()
    assert _block_mask_layouts.layout_of(again, (1, 2), (333, 400)) == layout


def test_lists_decide_what_is_full_and_what_is_not_there(rng):
    """Full blocks are full and blocks that are not listed are not there, whatever ``mask_mod`` says."""
    one = torch.ones(1, 1, 2, dtype=torch.int32)
    partial, full = torch.tensor([[[[1], [0]]]], dtype=torch.int32), torch.tensor([[[[0], [1]]]], dtype=torch.int32)
    mask = flex.BlockMask.from_kv_blocks(one, partial, one, full, BLOCK_SIZE=64, mask_mod=lambda b, h, q, k: q % 2 == 0,
                                         seq_lengths=(100, 128))
    layout = _block_mask_layouts.layout_of(mask, (1, 1), (100, 128))
    expected = numpy.zeros((100, 128), bool)
    expected[:64:2, 64:] = expected[:64, :64] = expected[64:, 64:] = expected[64::2, :64] = True
    assert layout == longspan.Layout.from_mask(expected)


@pytest.mark.parametrize("size", [(1, 1), (7, 7), (16, 16), (100, 100), (64, 200), (300, 32), (1 << 30, 1 << 30)], ids=str)
def test_any_block_size(size):
    window = masks.generate_sliding_window(50)
    if size[0] < 1 << 30:
        made = Case(window, block=size).block_mask()
    else:
        one = torch.ones(1, 1, 1, dtype=torch.int32)
        made = flex.BlockMask.from_kv_blocks(one, one[..., None] - 1, BLOCK_SIZE=size, mask_mod=window, seq_lengths=(N, N))
    layout = _block_mask_layouts.layout_of(made, (2, 4), (N, N))
    assert layout == longspan.Pattern("causal & window(50, 0)").compile(N)
    assert (layout.batch, layout.heads) == (None, None)


def test_without_a_mask_and_with_broadcast_keys(rng):
    q, k, v, dout = dense.tensors(rng, (3, 2, 2, 70, 90, 16, 16))
    expected = dense.truth(q, k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1),
                           numpy.ones((3, 2, 70, 90), bool), dout)
    out, lse = flex_attention(q, k[:1], v[:1], return_lse=True)
    dense.check({"out": out, "lse": lse, "dq": torch.autograd.grad(out, q, dout)[0]}, expected)


# --- What is kept


@pytest.fixture
def evaluations(monkeypatch):
    """How often a mask was evaluated."""
    made, evaluated = [], _block_mask_layouts._evaluated
    monkeypatch.setattr(_block_mask_layouts, "_evaluated", lambda *x: made.append(x[0]) or evaluated(*x))
    _block_mask_layouts._LAYOUTS.clear()
    return made


def test_masks_are_evaluated_once(rng, evaluations):
    q, k, v, dout = dense.tensors(rng, (2, 4, 4, N, N, 16, 16))
    mask = CASES["sliding"].block_mask()
    for _ in range(3):
        out = flex_attention(q, k, v, block_mask=mask)
        torch.autograd.grad(out, q, dout)
    assert len(evaluations) == 1
    # An equal mask that was made anew is another one; one of fewer heads has lists for any.
    flex_attention(q, k, v, block_mask=CASES["sliding"].block_mask())
    assert len(evaluations) == 2


def test_what_a_mask_captures_is_watched(rng, evaluations):
    """A tensor that was written to, a variable that was set, a number in a list: another mask."""
    offset, width, limits = torch.tensor(0), 50, [200]

    class Config:
        step = 1

    config = Config()

    def own(b, h, q, k):
        return (k <= q + offset) & (q + offset - k <= width) & (k < limits[0]) & (k % config.step == 0)

    lists = flex.create_block_mask(lambda b, h, q, k: q == q, None, None, N, N, device="cpu")
    full = lists.full_kv_num_blocks, lists.full_kv_indices
    mask = flex.BlockMask.from_kv_blocks(*full, BLOCK_SIZE=128, mask_mod=own, seq_lengths=(N, N))

    def pairs():
        return _block_mask_layouts.layout_of(mask, (1, 1), (N, N)).active_pairs

    def expected():
        return int(flex.create_mask(own, 1, 1, N, N, device="cpu").sum())

    seen = {pairs()}
    assert seen == {expected()} and pairs() in seen and len(evaluations) == 1
    offset += 5
    seen.add(pairs())
    assert pairs() == expected()
    width = 20
    seen.add(pairs())
    assert pairs() == expected()
    limits[0] = 150
    seen.add(pairs())
    assert pairs() == expected()
    config.step = 3
    seen.add(pairs())
    assert pairs() == expected()
    full[0][..., 1] -= 1
    seen.add(pairs())
    assert len(seen) == 6 and len(evaluations) == 6


def test_what_can_not_be_read_is_not_kept(rng, evaluations):
    bounds = numpy.array([100])
    mask = flex.create_block_mask(lambda b, h, q, k: k < int(bounds[0]), None, None, N, N, device="cpu")
    assert _captured.read(mask.mask_mod) is None
    for _ in range(2):
        _block_mask_layouts.layout_of(mask, (1, 1), (N, N))
    assert len(evaluations) == 2


def test_captured_functions_of_every_kind():
    table = torch.arange(10)

    class Callable:
        def __init__(self, size):
            self.size = size

        def __call__(self, b, h, q, k):
            return q - k < self.size

        def method(self, b, h, q, k):
            return k - q < self.size

    class Module(torch.nn.Module):
        def forward(self, b, h, q, k):
            return q < k

    first = Callable(3)

    def readings():
        known = {
            "object": first,
            "method": first.method,
            "partial": functools.partial(lambda w, b, h, q, k: q - k < w, 5),
            "default": lambda b, h, q, k, w=table: q < w[0],
            "module": Module(),
            "nested": flex.and_masks(first, lambda b, h, q, k: table[q] == k),
            "torch": lambda b, h, q, k: torch.where(q < k, q == k, q > k),
        }
        return {name: _captured.read(function) for name, function in known.items()}

    before = readings()
    assert None not in before.values()
    assert len(before["nested"].sources) > len(before["torch"].sources)
    assert any(x is table for x in before["default"].sources)
    first.size = 4
    after = readings()
    assert before["object"].values != after["object"].values
    assert before["method"].values != after["method"].values
    assert before["nested"].values != after["nested"].values


def test_variables_at_any_depth_are_watched():
    """Of modules within modules, of classes, of functions, behind methods written in C."""
    package, inner = types.ModuleType("package"), types.ModuleType("package.inner")
    package.inner, inner.width = inner, 1

    class Window:
        width = 1

        def __call__(self, b, h, q, k):
            return q - k < self.width

    def rule(b, h, q, k):
        return q - k < rule.width

    rule.width, table, window = 1, {0: 1}, Window()
    get = table.get
    functions = {
        "module": (lambda b, h, q, k: q - k < package.inner.width, lambda x: setattr(inner, "width", x)),
        "class": (window, lambda x: setattr(Window, "width", x)),
        "function": (rule, lambda x: setattr(rule, "width", x)),
        "bound": (lambda b, h, q, k: q - k < get(0), lambda x: table.update({0: x})),
        "NumPy": (lambda b, h, q, k, w=[numpy.int64(1)]: q - k < w[0], None),
    }
    functions["NumPy"] = (functions["NumPy"][0], lambda x: functions["NumPy"][0].__defaults__[0].__setitem__(0, numpy.int64(x)))
    for name, (function, change) in functions.items():
        before, again = _captured.read(function), _captured.read(function)
        assert before is not None and before.values == again.values, name
        change(2)
        assert _captured.read(function).values != before.values, name


class Queue(collections.deque):
    """Its items are in no attribute."""


HIDDEN = [Queue([3]), {(3,)}, random.Random(0), random.Random(0).random, numpy.array([3]), itertools.count()]


@pytest.mark.parametrize("captured", HIDDEN, ids=lambda x: type(x).__name__)
def test_state_out_of_sight_is_not_guessed(captured):
    assert _captured.read(lambda b, h, q, k: captured and q < k) is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it at every break.
def test_a_break_of_the_graph(rng):
    q, k, v, dout = dense.tensors(rng, (1, 4, 4, N, N, 16, 16))
    mask = CASES["sliding"].block_mask()

    def model(q):
        return flex_attention(2 * q, k, v, block_mask=mask).sin()

    ours = torch.compile(model)(q)
    torch.testing.assert_close(ours, model(q), rtol=1e-5, atol=2e-6)
    gradients = [torch.autograd.grad(x, q, dout)[0] for x in (ours, model(q))]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=2e-6)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, fullgraph=True)(q)


# --- What is refused


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"score_mod": lambda s, b, h, q, k: s * 2}, NotImplementedError, "score_mod is .*<lambda>.*longspan.torch.score_mod"),
        ({"kernel_options": {"BLOCK_M": 64}}, ValueError, "kernel_options is .*expected none"),
        ({"return_aux": flex.AuxRequest(max_scores=True)}, NotImplementedError, "max_scores"),
        ({"return_aux": flex.AuxRequest(lse=True), "return_lse": True}, ValueError, "expected one of both"),
        ({"block_mask": Case(masks.causal_mask, 40, 39).block_mask()}, ValueError, "40 queries and 39 keys, expected 40 and 40"),
        ({"block_mask": Case(per_head, 40, 40, listed=(None, 4)).block_mask()}, ValueError, "4 heads, expected 1 or 2"),
    ],
    ids=["score_mod", "kernel_options", "max_scores", "twice", "lengths", "heads"],
)
def test_refusals(options, error, message):
    q = torch.randn(1, 2, 40, 16)
    with pytest.raises(error, match=message):
        flex_attention(q, q, q, **options)


def test_damaged_lists_are_refused():
    counts, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)

    def layout(mask_mod=masks.causal_mask, indices=indices, full=(None, None)):
        mask = flex.BlockMask((40, 40), counts, indices, *full, None, None, None, None, mask_mod=mask_mod)
        return _block_mask_layouts.layout_of(mask, (1, 1), (40, 40))

    assert layout().active_pairs == 820
    with pytest.raises(ValueError, match="column 3, expected below 1"):
        layout(indices=indices + 3)
    with pytest.raises(ValueError, match=r"block \(0, 0\) twice"):
        layout(full=(counts, indices))
    with pytest.raises(TypeError, match="mask_mod returns torch.int64, expected torch.bool"):
        layout(lambda b, h, q, k: q - k)
