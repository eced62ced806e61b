"""``ring_attention``: one sequence over the ranks of a process group, with gradients."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from longspan import Dilated, Layout, Pattern
from longspan._longspan import ring_wire
from longspan.torch import _op, _run
from longspan.torch._attention import checked_scores, no_tangents, same_type, text_of
from longspan.torch._engine import check_device_type, described, engine_of, is_own
from longspan.torch._lengths import placed
from longspan.torch._ranks import Made, Problem, Ranks, check_backend, ranks_of, shard_ranges
from longspan.torch._run import Found, Learned, Places, Scores

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Dilated | str,
    *,
    group: ProcessGroup | None = None,
    shards: str = "contiguous",
    tokens: int | None = None,
    key_padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
    wire: Literal["exact", "bf16", "int8"] | float = "exact",
    timeout: float = 60.0,
    sink_logits: Tensor | None = None,
    bias_table: Tensor | None = None,
    bias_right: int = 0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0,
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Dilated | str,
    *,
    group: ProcessGroup | None = None,
    shards: str = "contiguous",
    tokens: int | None = None,
    key_padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    return_lse: Literal[True],
    wire: Literal["exact", "bf16", "int8"] | float = "exact",
    timeout: float = 60.0,
    sink_logits: Tensor | None = None,
    bias_table: Tensor | None = None,
    bias_right: int = 0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0,
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Dilated | str,
    *,
    group: ProcessGroup | None = None,
    shards: str = "contiguous",
    tokens: int | None = None,
    key_padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    return_lse: bool,
    wire: Literal["exact", "bf16", "int8"] | float = "exact",
    timeout: float = 60.0,
    sink_logits: Tensor | None = None,
    bias_table: Tensor | None = None,
    bias_right: int = 0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0,
) -> Tensor | tuple[Tensor, Tensor]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Dilated | str,
    *,
    group: ProcessGroup | None = None,
    shards: str = "contiguous",
    tokens: int | None = None,
    key_padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    return_lse: bool = False,
    wire: Literal["exact", "bf16", "int8"] | float = "exact",
    timeout: float = 60.0,
    sink_logits: Tensor | None = None,
    bias_table: Tensor | None = None,
    bias_right: int = 0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` over one sequence that the ranks of a process group hold together.

    Each rank gives its own tokens and gets its own rows, equal to those of one process that holds
    everything. Tensors are ``(batch, head, token, dim)``, f32, bf16 or f16, with any strides, on the CPU or
    each rank's CUDA device (computed by torch's FlexAttention there: docs/gpu.md). Only keys that a rank's
    queries see travel to it.

    >>> import torch, torch.distributed as dist, longspan.torch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mine = longspan.torch.ring_positions(1000, dist.get_rank(), dist.get_world_size(), "zigzag")
    >>> q = torch.randn(1, 4, 1000, 32)[:, :, mine].requires_grad_()
    >>> out = longspan.torch.ring_attention(q, q, q, "causal & window(128, 0)", shards="zigzag")
    >>> out.sum().backward()
    >>> longnet = longspan.Dilated([64, 128, 256], [1, 2, 4], within="causal")
    >>> longspan.torch.ring_attention(q, q, q, longnet, shards="zigzag").sum().backward()
    >>> dist.destroy_process_group()

    ``pattern`` is over positions in the whole sequence, whichever rank holds them. With a
    ``longspan.Dilated`` in its place it is LongNet's: segments are those of the whole sequence, offsets
    those of all query heads, and a sink counts once per row, not once per branch.

    ``group`` is a process group with Gloo for the CPU, the default one where left out. For tensors on CUDA
    devices it has NCCL for these, as ``init_process_group("cpu:gloo,cuda:nccl")`` makes one; what ranks agree
    on goes through Gloo, where this group has none through one that all ranks make at their first call.
    ``timeout`` is longer there than the first calls take, which compile kernels.

    ``shards`` says which tokens a rank holds, in the order of ``ring_positions``: ``"contiguous"`` (one
    range each), ``"zigzag"`` (one from the front and one from the back, so that causal work is even),
    ``"striped"`` (every n-th) or ``"balanced"`` (as many ranges each as make the work for the pattern
    even). ``tokens`` is the length of the whole sequence; left out, ranks tell each other what they hold,
    which takes a round of messages more.

    ``cu_seqlens``, ``(sequences + 1,)``, packs sequences side by side: each sees itself, and the pattern, or
    the branches, count positions within it. ``key_padding`` is for a ``longspan.Dilated`` alone: int64
    ``(batch, 2)`` of the first key with a token and the end of them, or bool ``(batch, tokens)``; branches
    count from the first. Both are those of the whole sequence, the same on every rank.

    ``wire`` is how keys and values are sent: ``"exact"``, ``"bf16"``, ``"int8"`` (with a scale per 64
    tokens of a head), or the largest error of an element, a float, for the smallest of these formats
    that keeps to it. Softmax statistics and gradients are always sent exactly. Between CUDA devices it is
    ``"exact"``.

    ``sink_logits``, ``bias_table`` with ``bias_right``, and ``alibi_slopes`` are those of ``attention``:
    parameters, the same on every rank. Their gradients are what this rank contributes;
    ``dist.all_reduce(parameter.grad)`` sums them over ranks, as for other parameters. ``dropout_p`` drops
    the same pairs on any number of ranks; its seed is drawn from the generator of the first rank.

    ``scale``, ``enable_gqa``, ``softcap`` and ``return_lse`` are those of ``attention``. It computes
    on as many threads as ``torch.get_num_threads()`` says, outside of what ``torch.compile`` compiles.

    **All ranks make the same calls in the same order**, backward passes too. Autograd sees to the
    latter where ranks build the same graph and all call ``backward``: it goes through a graph in the
    reverse order of its making. Ranks tell each other what comes next before each pass; if they
    disagree, or one has raised an error, all get a ``longspan.RingError`` (a ``RuntimeError``) that
    says which. A rank that dies, or that lets the others wait for longer than ``timeout`` seconds,
    ends in a ``RingError`` on all others. The group can't be used here after that: make a new one,
    or start the ranks again.

    What ranks find out about each other when they compute something for the first time is kept for
    the last 32 problems of a group (pattern, shards, shapes, types and options).
    """
    group, ranks = ranks_of(group)
    if not (isinstance(timeout, (int, float)) and math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout is {timeout!r}, expected seconds: more than 0, and finite")
    with ranks.lock:
        ranks.check()
        try:
            learned = Learned(sink_logits, bias_table, alibi_slopes)
            scores = Scores(scale, softcap, *learned, bias_right, dropout_p)
            q, k, v, scores = _checked(q, k, v, enable_gqa, scores)
            check_backend(group, q.device)
            length = _length(tokens)
            known = known_pattern(pattern)
            problem = Problem(
                pattern=placed(known, key_padding, cu_seqlens, q.shape[0], length),
                shards=known_shards(shards, ranks.size),
                tokens=length,
                sizes=(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3]),
                dtype=_run.NAMES[q.dtype],
                scale=None if scale is None else float(scale),
                softcap=None if softcap is None else float(softcap),
                wire=_known_wire(wire, q.device),
                threads=torch.get_num_threads(),
                precision=_run.precision(),
                timeout=float(timeout),
                device=None if is_own(q.device) else q.device,
                engine=engine_of(q.device).name,
            )
        except Exception:
            ranks.raised(timeout)
            raise
        inputs = [x for x in (q, k, v, *scores.learned) if x is not None]
        gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        shapes = [None if x is None else tuple(x.shape) for x in scores.learned]
        additions = (shapes, bias_right, scores.dropout_p)
        seed = 0 if scores.dropout_seed is None else int(scores.dropout_seed)
        made, seed = ranks.before_forward(problem, q.shape[2], gradients, additions, seed)
        if scores.dropout_seed is not None:
            scores = scores._replace(dropout_seed=torch.tensor(seed))
        numbers = scores._replace(**Learned()._asdict())
        around = _Around(group, ranks, made, float(timeout), numbers, gradients)
        out, lse, _ = _RingForward.apply(q, k, v, *scores.learned, around)
    return (out, lse) if return_lse else out


def ring_positions(
    tokens: int,
    rank: int,
    ranks: int,
    shards: str = "contiguous",
    *,
    pattern: Pattern | Dilated | str | None = None,
) -> Tensor:
    """The positions of the tokens that a rank holds, in the order in which it holds them: int64.

    >>> import longspan.torch
    >>> longspan.torch.ring_positions(10, 0, 2, "zigzag")
    tensor([0, 1, 7, 8, 9])
    >>> longspan.torch.ring_positions(10, 1, 2, "striped")
    tensor([1, 3, 5, 7, 9])

    A rank's share of the data is ``x[:, mine]`` where ``mine`` are its positions, and position
    embeddings are those of ``mine``.

    ``"balanced"`` shards are those for a ``pattern``, with sequences packed or padded as in the calls of
    ``ring_attention``; the other shards are the same for all patterns.
    """
    known = None if pattern is None else known_pattern(pattern)
    if known is None and shards == "balanced":
        raise ValueError(
            'pattern is None with shards="balanced", expected the pattern, its text, or the '
            "longspan.Dilated that the work is balanced for"
        )
    held = shard_ranges(shards, _length(tokens), ranks, known)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}, expected 0 to {ranks - 1}: there are {ranks} ranks")
    parts = [torch.arange(length) * step + start for start, step, length in held[rank]]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, scores: Scores
) -> tuple[Tensor, Tensor, Tensor, Scores]:
    """Whatever can be wrong with this rank's own tensors is found before others wait for it."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) not in (Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{name} is a {type(x).__name__}, expected a torch.Tensor of this rank's own tokens; a "
                "DTensor has to_local()"
            )
        if name == "q":
            check_device_type(x.device)
        if x.device != q.device:
            raise ValueError(
                f"{name} is on {x.device}, expected {described(q.device)}, as q: copy it there"
            )
        if x.ndim != 4:
            raise ValueError(
                f"{name} has {x.ndim} axes, expected 4: (batch, head, token, dim); x[None] adds one"
            )
        if x.shape[2] != q.shape[2]:
            raise ValueError(
                f"{name} has {x.shape[2]} tokens, expected {q.shape[2]} as q: a rank's queries and "
                "keys are of the same tokens"
            )
    q, k, v = same_type(q, k, v)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}, expected as many, or enable_gqa=True"
        )
    no_tangents(q, k, v)
    scale, softcap, *_, bias_right, dropout_p, _ = scores
    scores = checked_scores(q, scale, softcap, scores.learned, bias_right, dropout_p or 0.0)
    if is_own(q.device):
        # A call without tokens has everything else checked by the kernels' own rules.
        nothing = [x.detach()[:, :, :0] for x in (q, k, v)]
        _run.forward(_run.empty_output(nothing[0], nothing[2]), *nothing, "full", scores, Places())
    else:
        from longspan.torch._device_engine import check_shapes

        engine_of(q.device).check(q, k, v)
        check_shapes(q, k, v)
    return q, k, v, scores


def known_pattern(pattern: Any) -> str | Dilated:
    """A pattern as ranks compare it, or an error."""
    if isinstance(pattern, Layout):
        raise TypeError(
            "pattern is a longspan.Layout, expected a Pattern, its text, or a Dilated: a layout is of "
            "tokens that one process holds"
        )
    if isinstance(pattern, torch.nn.Module):
        raise TypeError(
            f"pattern is a {type(pattern).__name__}, a module, expected a Pattern, its text, or a "
            "Dilated: pass branches as longspan.Dilated(segment_lengths, dilation_rates, within=…), a "
            "scale as scale, dropout as dropout_p"
        )
    if isinstance(pattern, Dilated):
        return pattern
    if isinstance(pattern, Pattern):
        return str(pattern)
    # Two ways to write the same are the same.
    return str(_run.read(text_of(pattern)))


def known_shards(shards: Any, ranks: int) -> str:
    """A name of shards, or an error."""
    shard_ranges(shards, 0, ranks, "full")
    return shards


def _known_wire(wire: Any, device: torch.device) -> str | float:
    ring_wire(wire)
    if wire != "exact" and not is_own(device):
        raise ValueError(
            f'wire is {wire!r} with tensors on {device}, expected "exact": keys and values are sent as they are '
            "between devices; compute on the CPU for other formats"
        )
    return wire if isinstance(wire, str) else float(wire)


def _length(tokens: int | None) -> int | None:
    if tokens is None:
        return None
    if operator.index(tokens) < 0:
        raise ValueError(f"tokens is {tokens}, expected the length of the whole sequence")
    return operator.index(tokens)


class _Around:
    """Where a pass goes. It holds on to the group for as long as a graph may need it."""

    def __init__(
        self,
        group: ProcessGroup,
        ranks: Ranks,
        made: Made,
        timeout: float,
        scores: Scores,
        saves: bool,
    ):
        self.group, self.ranks, self.made, self.timeout = group, ranks, made, timeout
        self.scores = scores
        """Those that are numbers."""
        self.saves = saves
        """Whether a backward pass may follow."""

    def all_scores(self, learned: Learned) -> Scores:
        return self.scores._replace(**learned._asdict())


class _RingForward(torch.autograd.Function):
    """The forward pass; the caller holds the lock and has agreed with the other ranks."""

    @staticmethod
    def forward(ctx, q, k, v, sink_logits, bias_table, alibi_slopes, around):
        q, k, v = (x.resolve_neg() for x in (q, k, v))
        learned = Learned(sink_logits, bias_table, alibi_slopes)
        ring, scores = around.made.ring, around.all_scores(learned)
        saves = around.saves
        found = around.ranks.run(lambda: ring.forward(around.group, q, k, v, scores, saves))
        lse_lo = found.lse.new_empty((0,)) if found.lse_lo is None else found.lse_lo
        ctx.save_for_backward(q, k, v, found.out, found.lse, lse_lo, *learned)
        ctx.around, ctx.wanted = around, ctx.needs_input_grad[3:6]
        ctx.mark_non_differentiable(lse_lo)
        ctx.set_materialize_grads(False)
        return found.out, found.lse, lse_lo

    @staticmethod
    def backward(ctx, dout, dlse, _):
        # Also where no gradient has arrived: the others wait for this rank's part.
        gradients = _RingBackward.apply(*ctx.saved_tensors, dout, dlse, ctx.around, ctx.wanted)
        wanted = (True, True, True, *ctx.wanted)
        return (*(x if want else None for x, want in zip(gradients, wanted)), None)


class _RingBackward(torch.autograd.Function):
    """A function of its own, so that a second derivative is an error and not nothing."""

    @staticmethod
    def forward(ctx, q, k, v, out, lse, lse_lo, sinks, table, slopes, dout, dlse, *how):
        around, wanted = how
        found, scores = Found(out, lse, lse_lo), around.all_scores(Learned(sinks, table, slopes))
        dout, dlse = (None if x is None else x.resolve_neg() for x in (dout, dlse))
        ranks, ring, group = around.ranks, around.made.ring, around.group
        with ranks.lock:
            ranks.check()
            ranks.before_backward(around.made, around.timeout)
            return ranks.run(
                lambda: ring.backward(group, q, k, v, found, dout, dlse, scores, wanted)
            )

    backward = staticmethod(_op.no_second_derivative)
