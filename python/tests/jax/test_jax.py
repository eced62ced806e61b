"""JAX: forward and gradients against ``jax.nn`` and f64, transforms, flax, and what is refused."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy
import oracle
import pytest

import longspan
from longspan.jax import attention, attention_fn, dot_product_attention

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


class Case:
    """A call, by the rule of its pairs (positions, head)."""

    def __init__(self, pattern, rule, queries=97, keys=97, heads=(4, 2), dims=(32, 24), batch=2, dtype="float32",
                 offset=None, options=None):
        self.pattern, self.rule, self.queries, self.keys, self.batch = pattern, rule, queries, keys, batch
        self.heads, self.dims, self.dtype, self.offset = heads, dims, dtype, offset
        self.options = options or {}

    def tensors(self, rng):
        shapes = [(self.queries, self.heads[0], self.dims[0]), (self.keys, self.heads[1], self.dims[0]),
                  (self.keys, self.heads[1], self.dims[1]), (self.queries, self.heads[0], self.dims[1])]
        made = [rng.standard_normal((self.batch, *shape), dtype="float32") for shape in shapes]
        return [jnp.asarray(x).astype(DTYPES[self.dtype]) for x in made]

    def mask(self):
        """``(batch, head, query, key)``."""
        offset = self.keys - self.queries if self.offset is None else self.offset
        pairs = numpy.zeros((self.batch, self.heads[0], self.queries, self.keys), bool)
        for b, h, i, j in itertools.product(*map(range, pairs.shape)):
            pairs[b, h, i, j] = self.rule(b, h, i + offset, j)
        return pairs


def bounds(*ends):
    return jnp.asarray([0, *ends], jnp.int32)


def same(q, k, *ends):
    """Whether two tokens are in one sequence."""
    return sum(q >= end for end in ends) == sum(k >= end for end in ends)


def causal(b, h, q, k):
    return k <= q


CASES = {
    "full": Case("full", lambda b, h, q, k: True),
    "causal": Case("causal", causal),
    "causal, f16": Case("causal", causal, dtype="float16"),
    "causal, bf16": Case("causal", causal, dtype="bfloat16"),
    "window and sinks": Case("causal & (window(20, 0) | sinks(3))", lambda b, h, q, k: k <= q and (q - k <= 20 or k < 3)),
    "window both ways, bf16": Case("window(9, 9)", lambda b, h, q, k: abs(q - k) <= 9, dtype="bfloat16"),
    "fewer queries": Case("causal", causal, queries=31, keys=131),
    "more queries": Case("causal", causal, queries=131, keys=67, heads=(2, 2)),
    "one query": Case("causal", causal, queries=1, keys=60, heads=(8, 1)),
    "one token": Case("causal", causal, queries=1, keys=1, heads=(1, 1), dims=(1, 1), batch=1),
    "an offset": Case("causal", causal, queries=20, keys=60, offset=7, options={"query_offset": 7}),
    "empty rows": Case("causal & !window(5, 0)", lambda b, h, q, k: q - k > 5),
    "strided": Case("strided(3) | window(2, 2)", lambda b, h, q, k: (q - k) % 3 == 0 or abs(q - k) <= 2),
    "per head": Case("heads([causal, full, window(4, 4), sinks(2)])",
                     lambda b, h, q, k: (k <= q, True, abs(q - k) <= 4, k < 2)[h]),
    "per batch entry": Case("batch([causal, window(4, 4)])", lambda b, h, q, k: (k <= q, abs(q - k) <= 4)[b]),
    "odd dims": Case("causal", causal, dims=(13, 7), heads=(6, 3)),
    "wide heads": Case("causal & window(30, 0)", lambda b, h, q, k: 0 <= q - k <= 30, dims=(128, 128), batch=1),
    "packed": Case("causal & window(11, 0)", lambda b, h, q, k: same(q, k, 30, 31, 80) and 0 <= q - k <= 11,
                   options={"cu_seqlens": bounds(30, 31, 80, 97)}),
    "padding": Case("causal", lambda b, h, q, k: k <= q and (5 <= k < 90, k < 50)[b],
                    options={"key_padding": jnp.asarray([[5, 90], [0, 50]])}),
    "scale and softcap": Case("causal", causal, options={"scale": 0.3, "softcap": 2.0}),
}


def truth(case, tensors, dlse=None, score=None):
    q, k, v, dout = (numpy.asarray(x, "float64").transpose(0, 2, 1, 3) for x in tensors)
    scale, cap = case.options.get("scale"), case.options.get("softcap")

    def capped(x):
        y = numpy.tanh(x / cap)
        return cap * y, 1 - y**2

    return oracle.attention(q, k, v, case.mask(), dout, dlse, scale, capped if cap else score)


def check(case, found, expected, lse=None):
    true, gross = expected
    for name, x in found.items():
        oracle.check(name, numpy.asarray(x, "float64").transpose(0, 2, 1, 3), true, gross, case.dtype)
    if lse is not None:
        oracle.check("lse", numpy.asarray(lse), true, gross)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_against_f64(rng, name, compiled):
    case = CASES[name]
    *tensors, dout = case.tensors(rng)
    dlse = rng.standard_normal((case.batch, case.heads[0], case.queries), dtype="float32")

    def run(q, k, v):
        results, vjp = jax.vjp(lambda *x: attention(*x, case.pattern, return_lse=True, **case.options), q, k, v)
        # Rows that see nothing have no gradient, whatever arrives at them.
        return results, vjp((dout, jnp.asarray(dlse)))

    (out, lse), gradients = (jax.jit(run) if compiled else run)(*tensors)
    assert out.dtype == DTYPES[case.dtype] and lse.dtype == jnp.float32
    expected = truth(case, (*tensors, dout), numpy.where(case.mask().any(3), dlse, 0))
    check(case, dict(zip(("dq", "dk", "dv"), gradients), out=out), expected, lse)


#: Calls that jax.nn has: arguments, and sizes.
OF_JAX = {
    "full": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "window": ({"local_window_size": (9, 4)}, {}),
    "symmetric window": ({"local_window_size": 7, "is_causal": True}, {}),
    "causal, fewer queries": ({"is_causal": True}, {"queries": 50, "keys": 131}),
    "window, more queries": ({"local_window_size": (75, 20)}, {"queries": 131, "keys": 60}),
    "grouped": ({"is_causal": True, "scale": 0.3}, {"heads": (8, 2)}),
    "key lengths": ({"key_value_seq_lengths": jnp.asarray([97, 40], jnp.int32)}, {}),
    "both lengths": ({"query_seq_lengths": jnp.asarray([90, 33], jnp.int32), "is_causal": True,
                      "key_value_seq_lengths": jnp.asarray([97, 40], jnp.int32)}, {}),
    "mask": ({"mask": "pairs"}, {}),
    "mask of entries and heads": ({"mask": "all"}, {}),
    "mask and all else": ({"mask": "pairs", "is_causal": True, "local_window_size": (60, 0),
                           "key_value_seq_lengths": jnp.asarray([97, 80], jnp.int32)}, {}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OF_JAX)
def test_against_jax(rng, name, dtype):
    options, sizes = OF_JAX[name]
    case = Case("full", None, dims=(32, 32), dtype=dtype, **sizes)
    *tensors, dout = case.tensors(rng)
    options = dict(options)
    if "mask" in options:
        shape = (1, 1, 97, 97) if options["mask"] == "pairs" else (2, 4, 97, 97)
        mask = rng.random(shape) < 0.5
        # jax.nn averages all values where a query sees no key.
        mask[..., numpy.arange(97), numpy.arange(97) // 2] = True
        options["mask"] = jnp.asarray(mask)

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, q, k, v):
        (out, lse), vjp = jax.vjp(functools.partial(function, return_residual=True, **options), q, k, v)
        return out, lse, *vjp((dout, jnp.zeros_like(lse)))

    ours, theirs = run(dot_product_attention, *tensors), run(jax.nn.dot_product_attention, *tensors)
    # Rows of padding are zero in both; their log-sum-exp is that of no key here.
    rows = options.get("query_seq_lengths", jnp.full((2,), case.queries))[:, None, None] > jnp.arange(case.queries)[:, None]
    bound = 1e-5 if dtype == "float32" else 2**-6
    for place, (a, b) in enumerate(zip(ours, theirs)):
        a, b = (numpy.asarray(x, "float64") for x in (a, b))
        if place == 1:
            a, b = numpy.where(rows, a, 0), numpy.where(rows, b, 0)
        assert a.shape == b.shape
        assert numpy.abs(a - b).max() <= bound * max(1, numpy.abs(b).max()), place


def test_three_axes_and_a_pattern(rng):
    q, k, v, _ = Case("full", None, dims=(16, 16), batch=1).tensors(rng)
    out, lse = dot_product_attention(q[0], k[0], v[0], pattern="sinks(3) | window(5, 5)", is_causal=True,
                                     return_residual=True)
    whole, rows = attention(q, k, v, "causal & (sinks(3) | window(5, 5))", return_lse=True)
    assert (out == whole[0]).all() and (lse == rows[0].T).all()
    per_head = dot_product_attention(q, k, v, pattern="heads([causal, full, full, causal])")
    assert (per_head[:, :, 0] == attention(q, k, v, "causal")[:, :, 0]).all()


def test_learned_operands(rng):
    """Sink logits, ALiBi's slopes and a table against dense attention in f64."""
    case = Case("causal", causal)
    q, k, v, dout = case.tensors(rng)
    learned = {
        "sink_logits": jnp.asarray([0.5, -1.0, 2.0, 0.0]),
        "alibi_slopes": jnp.asarray([0.5, 0.25, 0.1, 0.01]),
        "bias_table": jnp.asarray(rng.standard_normal((4, 9), dtype="float32")),
    }

    def ours(learned, q, k, v):
        return (attention(q, k, v, "causal", bias_right=3, **learned) * dout).sum()

    with jax.enable_x64(True):

        def dense(learned, q, k, v):
            q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
            k, v = (jnp.repeat(x, 2, 1) for x in (k, v))
            apart = jnp.arange(97)[:, None] - jnp.arange(97)
            scores = q @ k.swapaxes(2, 3) / 32**0.5 - learned["alibi_slopes"][:, None, None] * abs(apart)
            scores += learned["bias_table"][:, jnp.clip(apart + 3, 0, 8)]
            scores = jnp.where(apart >= 0, scores, -jnp.inf)
            sinks = jnp.broadcast_to(learned["sink_logits"][:, None, None], (*scores.shape[:3], 1))
            p = jax.nn.softmax(jnp.concatenate([scores, sinks], 3))[..., :-1]
            return ((p @ v).transpose(0, 2, 1, 3) * jnp.asarray(dout, jnp.float64)).sum()

        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (learned, q, k, v))
        expected = jax.grad(dense, (0, 1, 2, 3))(*wide)
    found = jax.jit(jax.grad(ours, (0, 1, 2, 3)))(learned, q, k, v)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = numpy.asarray(a, "float64"), numpy.asarray(b)
        assert numpy.abs(a - b).max() <= 2e-5 * numpy.abs(b).max()


@pytest.mark.parametrize("overlap", ["weighted", "union"])
def test_dilated(rng, overlap):
    case = Case("full", causal, queries=150, keys=150)
    q, k, v, dout = case.tensors(rng)
    dilated = longspan.Dilated([32, 96], [1, 3], within="causal", overlap=overlap)
    out, vjp = jax.vjp(jax.jit(lambda *x: attention(*x, dilated)), q, k, v)
    tensors = [numpy.asarray(x).transpose(0, 2, 1, 3) for x in (q, k, v, dout)]
    expected = longspan.forward(*tensors[:3], dilated)
    gradients = longspan.backward(*tensors[:3], expected, tensors[3])
    assert (numpy.asarray(out).transpose(0, 2, 1, 3) == expected.out).all()
    for a, b in zip(vjp(dout), gradients):
        numpy.testing.assert_allclose(numpy.asarray(a).transpose(0, 2, 1, 3), b, rtol=1e-5, atol=1e-5)
    ends = bounds(40, 150)
    packed = attention(q[:1], k[:1], v[:1], dilated, cu_seqlens=ends)
    parts = [attention(*(x[:1, a:b] for x in (q, k, v)), dilated) for a, b in ((0, 40), (40, 150))]
    numpy.testing.assert_allclose(packed, jnp.concatenate(parts, 1), rtol=1e-5, atol=1e-5)


def test_one_program_for_all_packings(rng):
    """Bounds and padding are arrays: a compiled program serves all of them."""
    q, k, v, _ = Case("full", None).tensors(rng)
    traced = []

    @jax.jit
    def run(q, cu_seqlens, key_padding):
        traced.append(1)
        return attention(q, k, v, "causal", cu_seqlens=cu_seqlens, key_padding=key_padding)

    for ends in ((10, 97), (50, 97), (96, 97)):
        padding = jnp.asarray([[0, ends[0]], [3, 97]])
        found = run(q, bounds(*ends), padding)
        expected = attention(q, k, v, "causal", cu_seqlens=bounds(*ends), key_padding=padding)
        assert (found == expected).all()
    assert len(traced) == 1


def test_transforms(rng):
    case = Case("causal", causal)
    q, k, v, dout = case.tensors(rng)
    many = [jnp.stack([x, 2 * x, -x]) for x in (q, k, v)]

    def loss(q, k, v):
        return (attention(q, k, v, "causal & window(30, 0)") * dout).sum()

    # Batches of all, of some, of one in another place, nested; gradients of each.
    for axes in (0, (0, None, None), (None, 0, 0), (None, 0, None)):
        given = [x if axis == 0 else x[0] for x, axis in zip(many, axes if axes else (0, 0, 0))]
        for function in (jax.grad(loss, (0, 1, 2)), lambda *x: (attention(*x, "causal"),)):
            found = jax.jit(jax.vmap(function, axes))(*given)
            for n in range(3):
                own = [x[n] if axis == 0 else x for x, axis in zip(given, axes if axes else (0, 0, 0))]
                for a, b in zip(found, function(*own)):
                    numpy.testing.assert_allclose(a[n], b, rtol=1e-5, atol=1e-5)
    moved = jax.vmap(lambda q: attention(q, k, v, "causal"), in_axes=2, out_axes=1)(jnp.moveaxis(many[0], 0, 2))
    numpy.testing.assert_allclose(moved[:, 1], attention(many[0][1], k, v, "causal"), rtol=1e-5, atol=1e-5)
    nested = jax.vmap(jax.vmap(lambda q: attention(q[None], k[:1], v[:1], "causal")[0]))(many[0])
    numpy.testing.assert_allclose(nested[2, 0], attention(many[0][2][:1], k[:1], v[:1], "causal")[0], rtol=1e-5, atol=1e-5)
    # Operands per batch entry are batched with it, those of all are not.
    paddings = jnp.asarray([[[0, 50], [0, 97]], [[3, 97], [1, 20]], [[0, 1], [96, 97]]])
    padded = jax.vmap(lambda q, p: attention(q, k, v, "causal", key_padding=p, cu_seqlens=bounds(30, 97)))(many[0], paddings)
    for n in range(3):
        expected = attention(many[0][n], k, v, "causal", key_padding=paddings[n], cu_seqlens=bounds(30, 97))
        assert (padded[n] == expected).all()
    masks = jnp.asarray(rng.random((3, 2, 1, 97, 97)) < 0.5)
    masked = jax.vmap(lambda q, m: dot_product_attention(q, k, v[..., :], mask=m))(many[0], masks)
    numpy.testing.assert_allclose(masked[1], dot_product_attention(many[0][1], k, v, mask=masks[1]), rtol=1e-5, atol=1e-5)
    # Recomputed, in a loop, by rows of a jacobian.
    expected = jax.grad(loss)(q, k, v)
    assert (jax.grad(jax.checkpoint(loss))(q, k, v) == expected).all()
    scanned = jax.lax.scan(lambda total, x: (total + loss(x, k, v), None), 0.0, many[0])[0]
    assert abs(float(scanned - sum(loss(x, k, v) for x in many[0]))) < 1e-2
    rows = jax.jacrev(lambda q: attention(q, k[:1, :5], v[:1, :5], "full")[0, 0, 0, :3])(q[:1, :5])
    assert rows.shape == (3, 1, 5, 4, 32)


def batches(rng):
    """Calls of a tensor and another array: what of the latter a batch of them has."""
    q, k, v, _ = Case("full", None).tensors(rng)
    slopes = jnp.asarray([[0.5, 0.25, 0.1, 0.01], [0.0, 1.0, 2.0, 3.0], [0.1, 0.1, 0.1, 0.1]])
    keys = jax.random.split(jax.random.key(1), 3)
    ends = jnp.stack([bounds(a, 97) for a in (10, 50, 96)])
    pairs = jnp.asarray(rng.random((3, 97, 97)) < 0.5)
    drop = functools.partial(attention, dropout_p=0.3)
    return {
        "bounds": (lambda q, x: attention(q, k, v, "causal", cu_seqlens=x), ends),
        "slopes": (lambda q, x: attention(q, k, v, "causal", alibi_slopes=x), slopes),
        "one array for all": (lambda q, _: attention(q, k, v, "causal", alibi_slopes=slopes[0]), ends),
        "a mask for all entries": (lambda q, x: dot_product_attention(q, k, v, mask=x), pairs),
        "keys of dropout": (lambda q, x: drop(q, k, v, "causal", dropout_key=x), keys),
        "one key of dropout": (lambda q, _: drop(q, k, v, "causal", dropout_key=keys[0]), ends),
        "patterns per batch entry": (lambda q, _: attention(q, k, v, "batch([causal, window(4, 4)])"), ends),
    }, jnp.stack([q, 2 * q, -q])


@pytest.mark.parametrize("name", ["bounds", "slopes", "one array for all", "a mask for all entries", "keys of dropout",
                                  "one key of dropout", "patterns per batch entry"])
def test_a_batch_of_calls_is_each_call(rng, name):
    calls, queries = batches(rng)
    call, others = calls[name]
    found = jax.jit(jax.vmap(call))(queries, others)
    learned = name == "slopes"
    gradient = jax.grad(lambda q, x: (call(q, x) ** 2).sum(), (0, 1) if learned else (0,))
    found_gradients = jax.jit(jax.vmap(gradient))(queries, others)
    for n in range(3):
        numpy.testing.assert_allclose(found[n], call(queries[n], others[n]), rtol=1e-5, atol=1e-5)
        for a, b in zip(found_gradients, gradient(queries[n], others[n]), strict=True):
            numpy.testing.assert_allclose(a[n], b, rtol=1e-4, atol=1e-4)
    nested = jax.vmap(jax.vmap(call, (0, None)), (None, 0))(queries, others)
    numpy.testing.assert_allclose(nested[2, 1], call(queries[1], others[2]), rtol=1e-5, atol=1e-5)


def test_dropout(rng):
    q, k, v, _ = Case("full", None).tensors(rng)
    ones = jnp.ones_like(v)
    drop = jax.jit(lambda key: attention(q, k, ones, "causal", dropout_p=0.25, dropout_key=key))
    key = jax.random.key(3)
    first = drop(key)
    assert (first == drop(key)).all() and not (first == drop(jax.random.key(4))).all()
    # Of rows that sum to 1 without dropout.
    assert abs(float(first[:, 40:].mean()) - 1) < 0.02
    # The pairs, and the factor, that every front end has with this seed: 0.9 is no f32 number.
    seed = int(numpy.asarray(jax.random.bits(key, (2,), jnp.uint32)).view("<u8")[0])
    tensors = [numpy.asarray(x).transpose(0, 2, 1, 3) for x in (q, k, ones)]
    expected = longspan.forward(*tensors, "causal", dropout_p=0.9, dropout_seed=seed).out
    found = attention(q, k, ones, "causal", dropout_p=0.9, dropout_key=key)
    assert (numpy.asarray(found).transpose(0, 2, 1, 3) == expected).all()


def test_flax(rng):
    nnx, linen = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")
    x = jnp.asarray(rng.standard_normal((2, 150, 64), dtype="float32"))
    tril = jnp.tril(jnp.ones((150, 150), bool))[None, None]
    window = tril & (jnp.arange(150)[:, None] - jnp.arange(150) <= 20)

    def layer(function):
        return nnx.MultiHeadAttention(num_heads=4, in_features=64, qkv_features=64, decode=False,
                                      rngs=nnx.Rngs(0), attention_fn=function)

    def results(layer, mask):
        loss = lambda layer, x: (layer(x, mask=mask) ** 2).sum()
        return layer(x, mask=mask), nnx.grad(loss)(layer, x)

    for mask, options, pattern in (
        (tril, {"mask": None}, "causal"),
        (window, {"mask": None}, "causal & window(20, 0)"),
        (window, {"mask": window}, None),
    ):
        expected = results(layer(nnx.dot_product_attention), mask)
        found = results(layer(functools.partial(attention_fn, pattern=pattern)), options["mask"])
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert float(abs(a - b).max()) <= 1e-4 * max(1.0, float(abs(b).max()))

    def module(function):
        return linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=function)

    weights = module(linen.dot_product_attention).init(jax.random.key(0), x, mask=tril)
    expected = module(linen.dot_product_attention).apply(weights, x, mask=tril)
    ours = functools.partial(attention_fn, pattern="causal")
    assert float(abs(module(ours).apply(weights, x) - expected).max()) < 1e-4
    assert float(abs(module(attention_fn).apply(weights, x, mask=tril) - expected).max()) < 1e-4
    # Dropout of each head on its own.
    dropping = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=ours, dropout_rate=0.5, broadcast_dropout=False)
    run = lambda key: dropping.apply(weights, x, deterministic=False, rngs={"dropout": jax.random.key(key)})
    assert (run(1) == run(1)).all() and not (run(1) == run(2)).all()


# --- What is refused

X = jnp.ones((1, 10, 2, 8))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: jax.jvp(lambda q: attention(q, X, X, "causal"), (X,), (X,)), NotImplementedError, "no forward mode"),
        (lambda: jax.jacfwd(lambda q: attention(q, X, X, "causal"))(X), NotImplementedError, "no forward mode"),
        (lambda: jax.jvp(jax.jit(lambda q: attention(q, X, X, "causal")), (X,), (X,)), TypeError, "forward-mode"),
        (lambda: jax.grad(lambda q: jax.grad(lambda q: attention(q, X, X, "causal").sum())(q).sum())(X), ValueError, "longspan_"),
        (lambda: attention(X, X, X, "causl"), ValueError, "causal"),
        (lambda: attention(X, X, X, 3), TypeError, "pattern is a int"),
        (lambda: attention(X, X, X, "heads([causal])"), ValueError, "1 heads, expected 2"),
        (lambda: attention(X, X, X, "batch([causal, full])"), ValueError, "2 batch entries, expected 1"),
        (lambda: attention(X[0], X, X, "causal"), ValueError, "q has 3 axes"),
        (lambda: attention(X.astype(int), X, X, "causal"), TypeError, "q holds int32"),
        (lambda: attention(X.astype(jnp.bfloat16), X, X, "causal"), TypeError, "one type"),
        (lambda: attention(X, X[:, :5], X, "causal"), ValueError, "along axis 1"),
        (lambda: attention(X[:, :, :1], X, X, "causal"), ValueError, "multiple of the key heads"),
        (lambda: attention(jnp.ones((1, 9, 1, 300)), *[jnp.ones((1, 9, 1, 300))] * 2, "full"), ValueError, "head dim 300"),
        (lambda: attention(X, X, X, "causal", sink_logits=jnp.ones(3)), ValueError, "for 2 heads"),
        (lambda: attention(X, X, X, "causal", bias_right=1), ValueError, "without a bias_table"),
        (lambda: attention(X, X, X, "causal", dropout_p=0.1), ValueError, "expected both"),
        (lambda: attention(X, X, X, "causal", dropout_p=1.0, dropout_key=jax.random.key(0)), ValueError, "below 1"),
        (lambda: attention(X, X, X, "causal", key_padding=jnp.ones((2, 2), int)), ValueError, "expected \\(1, 2\\)"),
        (lambda: attention(X, X, X, "causal", cu_seqlens=bounds(10), query_offset=0), ValueError, "one of both"),
        (lambda: jax.jit(lambda s: attention(X, X, X, "causal", scale=s))(1.0), TypeError, "scale is traced"),
        (lambda: jax.jit(lambda s: attention(X, X, X, "causal", query_offset=s))(1), TypeError, "query_offset is a"),
        (lambda: attention(X, X, X, longspan.Dilated([4], [1]), key_offset=1), ValueError, "key_offset"),
        (lambda: dot_product_attention(X, X, X, bias=X), NotImplementedError, "bias_table or"),
        (lambda: dot_product_attention(X, X, X, implementation="cudnn"), ValueError, "implementation is 'cudnn'"),
        (lambda: dot_product_attention(X, X, X, mask=jnp.ones((3, 1, 10, 10), bool)), ValueError, "broadcasts to"),
        (lambda: dot_product_attention(X, X, X, mask=jnp.ones((10, 10), bool), pattern="causal"), ValueError, "one of both"),
        (lambda: dot_product_attention(X, X, X, is_causal=True, pattern=longspan.Dilated([4], [1])), ValueError, "alone"),
        (lambda: attention_fn(X, X, X, bias=X), NotImplementedError, "bias"),
        (lambda: attention_fn(X, X, X, dropout_rate=0.1, dropout_rng=jax.random.key(0)), NotImplementedError, "broadcast_dropout"),
        (lambda: attention_fn(X, X, X, qk_attn_weights_einsum=print), NotImplementedError, "qk_attn_weights_einsum"),
        # Found when the program runs.
        (lambda: attention(X, X, X, "documents([3])"), Exception, "INVALID_ARGUMENT: documents: lengths add up to 3"),
        (lambda: attention(X, X, X, "causal", cu_seqlens=bounds(3)), Exception, "INVALID_ARGUMENT: .*3"),
        (lambda: attention(X, X, X, "causal", threads=5000), Exception, "INVALID_ARGUMENT: 5000 threads"),
    ],
    ids=itertools.count(),
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        jax.block_until_ready(call())


def test_an_error_leaves_other_calls_as_they_were(rng):
    q, k, v, _ = Case("full", None).tensors(rng)
    before = attention(q, k, v, "causal")
    with pytest.raises(Exception, match="add up to"):
        jax.block_until_ready(attention(q, k, v, "documents([3])"))
    assert (attention(q, k, v, "causal") == before).all()
