"""LongNet written out in torch, f64, for tests: the paper's equations, and the model around them.

``equations`` gathers each segment's tokens by offset, attends, scatters, and mixes branches by their
softmax denominators (3 to 11); gradients are autograd's, through the mixing. ``gross`` has the sizes
of terms that the rule of ``oracle`` needs, from the other way to say the same: one softmax over the
keys of all branches, side by side, in which one that two branches have stands twice.
"""

from __future__ import annotations

import numpy
import oracle
import torch
import torch.nn.functional as F


def places(segment, rate, head, keys):
    """The tokens of each segment that a head has."""
    for start in range(0, keys, segment):
        yield torch.arange(start, min(start + segment, keys))[head % rate :: rate]


def equations(q, k, v, branches, allowed, scale=None):
    """Output and log-sum-exp of ``(batch, token, head, dim)`` tensors; ``allowed`` is bool,
    ``(queries, keys)``, and queries are the last positions."""
    (batch, queries, heads, dim), keys = q.shape, k.shape[1]
    scale = dim**-0.5 if scale is None else scale
    share, first = heads // k.shape[2], keys - queries
    outs, lses = [], []
    for segment, rate in branches:
        out = q.new_zeros(batch, queries, heads, v.shape[3])
        lse = q.new_full((batch, queries, heads), -torch.inf)
        for head in range(heads):
            for tokens in places(segment, rate, head, keys):
                rows = tokens[tokens >= first] - first
                if not len(rows):
                    continue
                sparse_q, sparse_k, sparse_v = (
                    q[:, rows, head], k[:, tokens, head // share], v[:, tokens, head // share]
                )
                scores = scale * sparse_q @ sparse_k.mT
                seen = allowed[rows][:, tokens]
                live = seen.any(1)
                scores = scores.masked_fill(~seen, -torch.inf)[:, live]
                rows = rows[live]
                at = torch.full_like(rows, head)
                found = scores.softmax(-1) @ sparse_v
                out = out.index_put((torch.arange(batch)[:, None], rows, at), found)
                found = scores.logsumexp(-1)
                lse = lse.index_put((torch.arange(batch)[:, None], rows, at), found)
        outs.append(out)
        lses.append(lse)
    outs, lses = torch.stack(outs), torch.stack(lses)
    dead = lses.isinf().all(0)
    total = lses.masked_fill(dead, 0).logsumexp(0)
    weights = (lses - total).exp().masked_fill(dead, 0)
    return (weights[..., None] * outs).sum(0), total.masked_fill(dead, -torch.inf)


def masks(branches, heads, allowed):
    """Which queries attend to which keys in each branch: ``(branch, head, query, key)``."""
    queries, keys = allowed.shape
    seen = numpy.zeros((len(branches), heads, queries, keys), dtype=bool)
    for index, (segment, rate) in enumerate(branches):
        for head in range(heads):
            for tokens in places(segment, rate, head, keys):
                rows = tokens[tokens >= keys - queries] - (keys - queries)
                seen[index, head][numpy.ix_(rows, tokens)] = True
    return seen & allowed.numpy()


def side_by_side(q, k, v, branches, allowed, dout, dlse=None, scale=None, once=False, also=None):
    """Truth and sizes of terms from one softmax over the keys of all branches; ``also`` is bool,
    ``(queries, keys)``, one more branch of all heads."""
    seen = masks(branches, q.shape[2], allowed)
    if also is not None:
        more = numpy.broadcast_to((also & allowed).numpy(), seen.shape[1:])
        seen = numpy.concatenate([seen, more[None]])
    seen = seen.any(0, keepdims=True) if once else seen
    q, k, v, dout = (turned(x.detach().double()).numpy() for x in (q, k, v, dout))
    dlse = None if dlse is None else dlse.double().mT.numpy()
    k, v = (numpy.concatenate([x] * len(seen), axis=2) for x in (k, v))
    both = oracle.attention(q, k, v, numpy.concatenate(seen, axis=2), dout, dlse, scale)
    return [side._replace(dk=joined(side.dk, seen), dv=joined(side.dv, seen)) for side in both]


def joined(gradient, seen):
    return sum(numpy.split(gradient, len(seen), axis=2))


def turned(x):
    return x.transpose(1, 2)


def truth(q, k, v, branches, allowed, dout, dlse=None, scale=None):
    """Results of the equations in f64 with autograd's gradients, and the sizes of terms; heads
    before tokens, as ``oracle.check`` takes them."""
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = equations(*inputs, branches, allowed, scale)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isinf(), 0) * dlse.double()).sum()
    gradients = torch.autograd.grad(loss, inputs)
    fields = turned(out), lse.mT, *(turned(x) for x in gradients)
    found = oracle.Truth(*(x.detach().numpy() for x in fields))
    return found, side_by_side(q, k, v, branches, allowed, dout, dlse, scale)[1]


def model(weights, config, ids=None, x=None):
    """A language model (of ``ids``) or an encoder (of ``x``) from ``docs/longnet-weights.md``."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    dim, eps = hidden // heads, config.layer_norm_eps

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name, x):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def rotate(x):
        if config.positions == "none":
            return x
        base, half = config.positions["rotary"]["base"], dim // 2
        n = torch.arange(x.shape[1], dtype=torch.float64)
        theta = torch.stack([n * base ** (-2 * j / dim) for j in range(half)], 1)[:, None]
        cos, sin = theta.cos(), theta.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    if ids is not None:
        x = weights["embed_tokens.weight"][ids]
    tokens = x.shape[1]
    allowed = torch.ones(tokens, tokens, dtype=bool)
    if ids is not None:
        allowed = allowed.tril()
    dilated = config.attention["dilated"]
    branches = list(zip(dilated["segment_lengths"], dilated["dilation_rates"]))
    for i in range(config.num_hidden_layers):
        at = f"layers.{i}"
        y = norm(f"{at}.self_attn_layer_norm", x)
        q, k, v = (
            linear(f"{at}.self_attn.{p}_proj", y).reshape(*y.shape[:2], heads, dim) for p in "qkv"
        )
        a, _ = equations(rotate(q), rotate(k), v, branches, allowed)
        a = norm(f"{at}.self_attn.inner_attn_ln", a.reshape(*y.shape))
        x = x + linear(f"{at}.self_attn.out_proj", a)
        y = norm(f"{at}.final_layer_norm", x)
        y = linear(f"{at}.ffn.fc1", y)
        y = 0.5 * y * (1 + torch.erf(y / 2**0.5))
        x = x + linear(f"{at}.ffn.fc2", norm(f"{at}.ffn.ffn_layernorm", y))
    x = norm("layer_norm", x)
    return x if ids is None else linear("output_projection", x)
