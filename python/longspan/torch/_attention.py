"""``attention``: what a caller says, checked and put into the operator's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from longspan import Dilated, Layout, Pattern, batch
from longspan._longspan import direct_forward
from longspan.torch import _functional, _op, _run
from longspan.torch._engine import check_device_type, check_learned, described, engine_of, is_own
from longspan.torch._run import Found, Learned, Places, Scores


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str | Sequence[Pattern | str] | Layout | Dilated,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
    key_padding: Tensor | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    query_offset: int | Tensor | None = None,
    key_offset: int | Tensor | None = None,
    global_tokens: Tensor | None = None,
    prefix: Tensor | None = None,
    sink_logits: Tensor | None = None,
    bias_table: Tensor | None = None,
    bias_right: int = 0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str | Sequence[Pattern | str] | Layout | Dilated,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    return_lse: Literal[True],
    key_padding: Tensor | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    query_offset: int | Tensor | None = None,
    key_offset: int | Tensor | None = None,
    global_tokens: Tensor | None = None,
    prefix: Tensor | None = None,
    sink_logits: Tensor | None = None,
    bias_table: Tensor | None = None,
    bias_right: int = 0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str | Sequence[Pattern | str] | Layout | Dilated,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    return_lse: bool,
    key_padding: Tensor | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    query_offset: int | Tensor | None = None,
    key_offset: int | Tensor | None = None,
    global_tokens: Tensor | None = None,
    prefix: Tensor | None = None,
    sink_logits: Tensor | None = None,
    bias_table: Tensor | None = None,
    bias_right: int = 0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str | Sequence[Pattern | str] | Layout | Dilated,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    return_lse: bool = False,
    key_padding: Tensor | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    query_offset: int | Tensor | None = None,
    key_offset: int | Tensor | None = None,
    global_tokens: Tensor | None = None,
    prefix: Tensor | None = None,
    sink_logits: Tensor | None = None,
    bias_table: Tensor | None = None,
    bias_right: int = 0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the pairs that ``pattern`` allows, with gradients.

    Tensors are ``(batch, head, token, dim)``, f32, bf16 or f16, with any strides, on the CPU or a CUDA
    device (computed by torch's FlexAttention there: docs/gpu.md). A query that sees nothing gives zeros.

    >>> import torch, longspan.torch
    >>> q = torch.randn(1, 4, 2048, 32, requires_grad=True)
    >>> out = longspan.torch.attention(q, q, q, "causal & (window(256, 0) | sinks(16))")
    >>> out.sum().backward()
    >>> q.grad.shape
    torch.Size([1, 4, 2048, 32])

    A list of patterns is one per batch entry.

    ``scale`` is ``1 / sqrt(dim)`` unless given. With ``enable_gqa`` there may be fewer key heads
    than query heads. ``softcap`` squashes scores to ``softcap * tanh(score / softcap)``.

    ``sink_logits`` is a tensor ``(head,)`` of any floating-point type, with a gradient: a learned logit
    per query head that joins the denominator of each of its rows once, with value 0 (gpt-oss). The
    log-sum-exp includes it. A query that sees nothing gives zeros, and its log-sum-exp is the logit.
    -inf is a head without a sink.

    >>> sinks = torch.zeros(4, requires_grad=True)
    >>> out = longspan.torch.attention(q, q, q, "causal", sink_logits=sinks)
    >>> out.sum().backward()
    >>> sinks.grad.shape
    torch.Size([4])

    ``bias_table`` ``(head, distance)`` is added to scores, behind the softcap: column ``query - key +
    bias_right``, distances clamped to those that it has. ``alibi_slopes`` ``(head,)`` subtracts
    ``slope * |query - key|``. Both have gradients. Under ``cu_seqlens`` distances are those within a
    sequence.

    ``dropout_p`` drops probabilities, as torch's own function does. The seed is drawn from torch's
    generator, so ``torch.manual_seed`` and activation checkpointing reproduce which ones.

    ``return_lse`` adds the log-sum-exp of each row, f32, ``(batch, head, token)``; it has gradients
    too.

    ``key_padding`` says which keys hold tokens: int64 ``(batch, 2)`` of the first and the end, or
    bool ``(batch, tokens)``.

    ``cu_seqlens``, int32 or int64 ``(sequences + 1,)``, packs sequences side by side: each sees
    itself, and the pattern counts positions within it. A pair of them is for queries and keys. With
    two axes it has a row per batch entry; one with fewer sequences repeats its last number.

    ``global_tokens``, bool ``(batch, tokens)`` over the keys, joins pairs to the pattern: all queries
    see these keys, and queries at their positions see all keys (Longformer). ``prefix``, int64
    ``(batch,)``, joins the first keys of an entry for all queries: with ``causal`` a prefix-LM.

    Query ``i`` stands at position ``i + query_offset``, key ``j`` at ``j + key_offset``. Left out,
    ``key_offset`` is 0 and ``query_offset`` is ``key_offset + tokens_k - tokens_q``: the queries are
    the *last* positions. A key cache whose slots aren't all filled has to pass its offsets.

    Under ``torch.compile`` the pattern is text (or a ``Pattern``, where torch is recent enough to
    take one), and a constant of the graph: give as tensors what changes. A ``Layout`` is for eager
    mode, and has its own offsets and padding.

    With a ``longspan.Dilated`` in place of a pattern it is LongNet's: the keys of a batch entry that hold
    tokens, or each packed sequence, are a sequence of their own, in which branches count from the first
    key. ``query_offset`` is the only offset. ``DilatedAttention`` is the module.
    """
    if (
        scale is softcap is key_padding is cu_seqlens is query_offset is key_offset is None
        and global_tokens is prefix is sink_logits is bias_table is alibi_slopes is None
        and not (return_lse or bias_right or dropout_p)
        and isinstance(pattern, (str, Pattern))
        and not torch.compiler.is_compiling()
        and is_own(q.device)
    ):
        out = direct_forward(q, k, v, _run.read(pattern), enable_gqa)
        if out is not None:
            return out
    q, k, v = checked(q, k, v)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}, expected as many, or enable_gqa=True"
        )
    cu_q, cu_k = cu_seqlens if isinstance(cu_seqlens, (tuple, list)) else (cu_seqlens, cu_seqlens)
    if cu_seqlens is not None and (query_offset is not None or key_offset is not None):
        raise ValueError(
            "cu_seqlens and an offset: expected one of both, packed sequences count their own "
            "positions"
        )
    places = Places(key_padding, cu_q, cu_k, query_offset, key_offset, global_tokens, prefix)
    scores = checked_scores(
        q, scale, softcap, Learned(sink_logits, bias_table, alibi_slopes), bias_right, dropout_p
    )
    if isinstance(pattern, Layout):
        found = _over_layout(q, k, v, pattern, scores, places)
    elif isinstance(pattern, Dilated):
        found = over_branches(q, k, v, _branches(pattern), scores, _with_lengths(pattern, places))
    elif _is_direct(q, k, v, scores.learned):
        engine = engine_of(q.device)
        found = engine.forward(q, k, v, _known(pattern), scores, places, saves=False)
    else:
        text, places = text_of(pattern), Places(*map(_tensor, places))
        if _functional.is_transformed():
            found = _functional.attention(
                q, k, v, "attention", (text,), places._asdict(), scores
            )
        else:
            found = _op.attention(q, k, v, text, *places, *scores)
    return (found[0], found[1]) if return_lse else found[0]


def checked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of four axes, one type and one device, or an error."""
    check_device_type(q.device)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check(name, x, q.device)
    no_tangents(q, k, v)
    if q.dtype != k.dtype or q.dtype != v.dtype or torch.is_autocast_enabled(q.device.type):
        return same_type(q, k, v)
    return q, k, v


def checked_scores(
    q: Tensor,
    scale: float | None,
    softcap: float | None,
    learned: Learned,
    bias_right: int = 0,
    dropout_p: float = 0,
) -> Scores:
    """What is done to scores, or an error. Dropout draws its seed here; its default is an integer, since
    dynamo takes floats for variables and traces once more."""
    learned = Learned(
        _parameter("sink_logits", learned.sink_logits, q, "(heads,): one logit per query head"),
        _parameter("bias_table", learned.bias_table, q, "(heads, distances)", axes=2),
        _parameter("alibi_slopes", learned.alibi_slopes, q, "(heads,): one per query head"),
    )
    if learned.bias_table is None and bias_right != 0:
        raise ValueError(f"bias_right is {bias_right} without a bias_table: leave it out")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}, expected a number from 0 to below 1")
    check_learned(q, Scores(None, None, *learned, dropout_p=dropout_p))
    if not dropout_p:
        return Scores(scale, softcap, *learned, bias_right)
    seed = torch.randint(1 << 62, (), dtype=torch.int64)
    return Scores(scale, softcap, *learned, bias_right, float(dropout_p), seed)


def _parameter(
    name: str, x: Tensor | None, q: Tensor, expected: str, axes: int = 1
) -> Tensor | None:
    """A learned tensor in f32, or an error."""
    if x is None:
        return None
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor {expected}")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, expected {described(q.device)}, as q")
    if not x.is_floating_point() or x.ndim != axes or x.shape[:1] != q.shape[1:2]:
        raise ValueError(
            f"{name} is a {str(x.dtype)[6:]} tensor of shape {tuple(x.shape)}, expected "
            f"floating-point of shape {expected}, for {q.shape[1]} heads"
        )
    return x.float()


def no_tangents(*tensors: Tensor) -> None:
    """Refuses forward-mode differentiation, under which an operator would drop tangents silently."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for x in tensors:
        # A tangent of an outer transform can't be seen from inside.
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
        if wrapped or forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                "longspan has no forward-mode differentiation (jvp, jacfwd, linearize, hessian): use "
                "reverse mode (vjp, jacrev, backward), or torch's scaled_dot_product_attention with "
                "its math backend"
            )


def _check(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, expected {described(device)}, as q: copy it there")
    if x.ndim != 4:
        raise ValueError(
            f"{name} has {x.ndim} axes, expected 4: (batch, head, token, dim); x[None] adds one"
        )


def same_type(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast makes of tensors, by the rule of torch's own attention: all but f64 become the
    type that it asks for. Without it types have to agree."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (
            x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
            for x in (q, k, v)
        )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise TypeError(
            f"q, k and v hold {q.dtype}, {k.dtype} and {v.dtype}, expected one type: convert them, or "
            "let torch.autocast do so"
        )
    return q, k, v


def _is_direct(q: Tensor, k: Tensor, v: Tensor, learned: tuple[Tensor | None, ...]) -> bool:
    """Whether only the kernel would see a call of the operator: no gradient, no mode that
    traces or counts, no transform of functions. Decoding a token takes tens of microseconds, of
    which the dispatcher's way through Python would be 20."""
    return (
        not torch.compiler.is_compiling()
        and type(q) is type(k) is type(v) is Tensor
        and not (
            torch.is_grad_enabled()
            and any(x is not None and x.requires_grad for x in (q, k, v, *learned))
        )
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _known(pattern: Any) -> Pattern | str:
    if isinstance(pattern, (str, Pattern)):
        return pattern
    if isinstance(pattern, (list, tuple)):
        return batch(pattern)
    raise TypeError(
        f"pattern is a {type(pattern).__name__}, expected a longspan.Pattern, its text, a list of "
        "these, a longspan.Layout, or a longspan.Dilated"
    )


@_run.constant
def text_of(pattern: Any) -> str:
    """A constant of compiled graphs: those who compile keep the pattern as it is."""
    return str(_known(pattern))


def _tensor(place: int | Tensor | None) -> Tensor | None:
    """An offset as the operator takes it: a number would be a constant of a compiled graph."""
    if place is None or isinstance(place, Tensor):
        return place
    return torch.full((), place, dtype=torch.int64, device="cpu")


def _over_layout(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scores: Scores, places: Places
) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        raise TypeError(
            "pattern is a longspan.Layout, expected a Pattern or its text under torch.compile: a "
            "layout is no part of a graph"
        )
    for name, value in zip(Places._fields, places):
        if value is not None:
            raise ValueError(
                f"{name}: a layout has its own; leave it out, or give it to Pattern.compile"
            )
    rest = scores._replace(**Learned()._asdict())
    return _OverLayout.apply(q, k, v, *scores.learned, layout, rest)


class Branches(NamedTuple):
    """``Dilated`` as the operator takes it."""

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    within: str
    also: str | None
    overlap: str


@_run.constant
def _branches(dilated: Dilated) -> Branches:
    lengths, rates = dilated.segment_lengths, dilated.dilation_rates
    also = None if dilated.also is None else str(dilated.also)
    return Branches(tuple(lengths), tuple(rates), str(dilated.within), also, dilated.overlap)


@_run.constant
def _lengths(dilated: Dilated) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Padding and packed sequences of an object, as tensors."""
    padding, bounds = dilated.key_padding, dilated.cu_seqlens
    queries, keys = (None, None) if bounds is None else map(torch.tensor, bounds)
    return None if padding is None else torch.tensor(padding).view(-1, 2), queries, keys


def _with_lengths(dilated: Dilated, places: Places) -> Places:
    own = _lengths(dilated)
    if all(tensor is None for tensor in own):
        return places
    if places.key_padding is not None or places.cu_seqlens_q is not None:
        raise ValueError(
            "key_padding or cu_seqlens beside a Dilated that is padded or packed already: expected one "
            "of both"
        )
    padding, queries, keys = own
    rest = (places.query_offset, places.key_offset, places.global_tokens, places.prefix)
    return Places(padding, queries, keys, *rest)


def over_branches(
    q: Tensor, k: Tensor, v: Tensor, branches: Branches, scores: Scores, places: Places
) -> tuple[Tensor, ...]:
    """Dilated attention of tensors that were checked."""
    for name in ("key_offset", "global_tokens", "prefix"):
        if getattr(places, name) is not None:
            raise ValueError(
                f"{name}: expected None, dilated attention has none: its segments begin at the first key"
            )
    if places.cu_seqlens_q is not None:
        for name in ("key_padding", "query_offset"):
            if getattr(places, name) is not None:
                raise ValueError(
                    f"{name} beside cu_seqlens: expected one of both, packed sequences are as long as "
                    "their tokens and count their own positions"
                )
    if _is_direct(q, k, v, scores.learned):
        engine, dilated = engine_of(q.device), _run.dilated(*branches)
        return engine.forward(q, k, v, dilated, scores, places, saves=False)
    offset = _tensor(places.query_offset)
    taken = (places.key_padding, places.cu_seqlens_q, places.cu_seqlens_k, offset)
    if _functional.is_transformed():
        named = dict(zip(Places._fields, taken))
        return _functional.attention(q, k, v, "dilated_attention", branches, named, scores)
    return _op.dilated_attention(q, k, v, *branches, *taken, *scores)


class _OverLayout(torch.autograd.Function):
    """Attention over a layout, which no operator can take; held as long as the graph is."""

    @staticmethod
    def forward(ctx, q, k, v, sink_logits, bias_table, alibi_slopes, layout, scores):
        # The dispatcher, which sees to a sign that torch keeps beside numbers, isn't on the way.
        q, k, v = (x.resolve_neg() for x in (q, k, v))
        learned = Learned(sink_logits, bias_table, alibi_slopes)
        all_scores = scores._replace(**learned._asdict())
        engine = engine_of(q.device)
        found = engine.forward(q, k, v, layout, all_scores, Places(), saves=True)
        ctx.save_for_backward(q, k, v, *found, *learned)
        ctx.how = layout, scores, ctx.needs_input_grad[3:6]
        ctx.mark_non_differentiable(found.lse_lo)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx, dout, dlse, _):
        if dout is None and dlse is None:
            return (None,) * 8
        gradients = _OverLayoutBackward.apply(*ctx.saved_tensors, dout, dlse, *ctx.how)
        wanted = (True, True, True, *ctx.how[2])
        return (*(x if want else None for x, want in zip(gradients, wanted)), None, None)


class _OverLayoutBackward(torch.autograd.Function):
    """A function of its own, so that a second derivative is an error and not nothing."""

    @staticmethod
    def forward(ctx, q, k, v, out, lse, lse_lo, sinks, table, slopes, dout, dlse, *how):
        layout, scores, wanted = how
        found = Found(out, lse, lse_lo)
        scores = scores._replace(**Learned(sinks, table, slopes)._asdict())
        dout, dlse = (None if x is None else x.resolve_neg() for x in (dout, dlse))
        engine = engine_of(q.device)
        return engine.backward(q, k, v, found, dout, dlse, layout, scores, Places(), wanted)

    backward = staticmethod(_op.no_second_derivative)
