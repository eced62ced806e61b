"""Tensors that hold real numbers, handed to the compiled part.

Nothing here is traced: a tensor is read where it lies, and what differs by batch (offsets, padding,
lengths of packed sequences) has come as tensors whose values are looked at only now. So a graph that
``torch.compile`` made once serves every length and every packing.

Results lie in memory as ``(batch, token, head, dim)``, whatever the strides of what came in, as
those of torch's own attention on a CPU do: a model goes on with ``out.transpose(1, 2).flatten(2)``,
which then copies nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import longspan
from longspan._longspan import raw_backward, raw_forward

#: The types that kernels have, by the names that the compiled part knows.
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

T = TypeVar("T")

#: Texts up to this length are read once. Longer ones list lengths or blocks, which are best given
#: as tensors or as a layout.
_SHORT = 1_000


def constant(function: Callable[..., T]) -> Callable[..., T]:
    """``torch.compiler.assume_constant_result``, which would import dynamo, in seconds, for those too who never
    compile: a mark that dynamo looks for."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Places(NamedTuple):
    """What changes from batch to batch."""

    key_padding: Tensor | None = None
    """The keys that hold tokens: ``(batch, 2)`` of first and end, or ``(batch, tokens)`` of bools."""
    cu_seqlens_q: Tensor | None = None
    """Where sequences of queries begin, and the last one ends; a row per batch entry where it has two
    axes."""
    cu_seqlens_k: Tensor | None = None
    query_offset: int | Tensor | None = None
    key_offset: int | Tensor | None = None
    global_tokens: Tensor | None = None
    """Keys, and the queries at their positions, that have all pairs: ``(batch, tokens)`` of bools."""
    prefix: Tensor | None = None
    """How many keys from the first on all queries see: ``(batch,)``."""

    def on_host(self) -> Places:
        """The same in memory of the host; a tensor of a device is copied once."""
        queries = self.cu_seqlens_q
        moved = [x.cpu() if isinstance(x, Tensor) else x for x in self]
        places = Places(*moved)
        # That they are one object says that there is one list of sequences.
        same = queries is not None and self.cu_seqlens_k is queries
        return places._replace(cu_seqlens_k=places.cu_seqlens_q) if same else places


class Scores(NamedTuple):
    """What is done to scores and probabilities, and what joins them."""

    scale: float | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
    """f32, one per query head."""
    bias_table: Tensor | None = None
    """f32, ``(heads, distances)``."""
    alibi_slopes: Tensor | None = None
    """f32, one per query head."""
    bias_right: int = 0
    dropout_p: float | None = None
    """None for 0."""
    dropout_seed: Tensor | None = None
    """int64 without axes."""

    @property
    def learned(self) -> Learned:
        """Those that have gradients."""
        return Learned(self.sink_logits, self.bias_table, self.alibi_slopes)


class Learned(NamedTuple):
    """Options that have gradients: tensors, or gradients of them."""

    sink_logits: Tensor | None = None
    bias_table: Tensor | None = None
    alibi_slopes: Tensor | None = None


class Found(NamedTuple):
    """What the forward pass makes; the backward pass needs all of it."""

    out: Tensor
    lse: Tensor
    lse_lo: Tensor | None
    """What rounding ``lse`` to f32 left out; only the backward pass needs it."""


def empty(like: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """An axis of heads before that of tokens, the other way round in memory."""
    _, heads, tokens, dim = shape
    strides = (tokens * heads * dim, dim, heads * dim, 1)
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)


def empty_output(q: Tensor, v: Tensor) -> Found:
    """Room for what a caller gets."""
    batch, heads, tokens, _ = q.shape
    rows = (batch, heads, tokens)
    out = empty(q, (*rows, v.shape[3]))
    return Found(out, torch.empty(rows, dtype=torch.float32, device=q.device), None)


def empty_found(q: Tensor, v: Tensor) -> Found:
    """Room for what the backward pass needs too."""
    found = empty_output(q, v)
    return found._replace(lse_lo=torch.empty_like(found.lse))


def forward(
    found: Found, q: Tensor, k: Tensor, v: Tensor, pattern: Any, scores: Scores, places: Places
) -> Found:
    """Attention, written to ``found``; ``pattern`` is a pattern, text, a layout or dilated."""
    raw_forward(
        raw(q),
        raw(k),
        raw(v),
        raw(found.out),
        raw(found.lse),
        None if found.lse_lo is None else raw(found.lse_lo),
        with_places(pattern, places, k),
        torch.get_num_threads(),
        precision(),
        **_options(scores, places, k),
    )
    return found


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: Found,
    dout: Tensor | None,
    dlse: Tensor | None,
    pattern: Any,
    scores: Scores,
    places: Places,
    wanted: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, ...]:
    """Gradients; one that didn't arrive is zero. The last three are those of sink logits, bias table
    and slopes, without elements where there are none or they aren't wanted."""
    if dout is None:
        dout = found.out.new_zeros(()).expand(found.out.shape)
    # Held by name until the call returns: only addresses are handed over.
    lse, lse_lo = found.lse.contiguous(), found.lse_lo.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = (empty(x, x.shape) for x in (q, k, v))
    lists = raw_backward(
        raw(q),
        raw(k),
        raw(v),
        raw(found.out),
        raw(lse),
        raw(lse_lo),
        raw(dout),
        None if dlse is None else raw(dlse),
        raw(dq),
        raw(dk),
        raw(dv),
        with_places(pattern, places, k),
        wanted,
        torch.get_num_threads(),
        precision(),
        **_options(scores, places, k),
    )
    return dq, dk, dv, *learned_gradients(lists, scores.learned)


def learned_gradients(
    lists: tuple[bytes | None, ...], learned: Learned
) -> tuple[Tensor, ...]:
    """Gradients of options as the compiled part returns them, without elements where there are none."""
    return tuple(_gradient(list, like) for list, like in zip(lists, learned))


def _gradient(list: bytes | None, like: Tensor | None) -> Tensor:
    if list is None or like is None:
        return torch.empty((0,), dtype=torch.float32)
    return torch.frombuffer(bytearray(list), dtype=torch.float32).view(like.shape)


def empty_learned(learned: Learned, wanted: Sequence[bool], device: torch.device) -> list[Tensor]:
    """Room for gradients of options."""
    shapes = [x.shape if want and x is not None else (0,) for x, want in zip(learned, wanted)]
    return [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes]


def raw(x: Tensor) -> Tensor | tuple[int, tuple[int, ...], tuple[int, ...], str]:
    """A tensor as the compiled part takes it; the caller holds on to it."""
    if _READS:
        return x
    name = NAMES.get(x.dtype)
    return x.data_ptr(), x.shape, x.stride(), str(x.dtype)[6:] if name is None else name


#: Whether the compiled part reads torch's tensors itself, by DLPack's functions.
_READS = hasattr(Tensor, "__dlpack_c_exchange_api__")

#: Names of torch for f32 products of less than f32.
_REDUCED = frozenset(("high", "medium", "tf32", "bf16"))

#: Scores and places of most calls, of which nothing has to be said.
_PLAIN_SCORES = Scores()
_PLAIN_PLACES = Places()


def _options(scores: Scores, places: Places, k: Tensor) -> dict[str, Any]:
    # Fields are compared by identity: tensors have no truth.
    options: dict[str, Any] = {}
    if not all(map(is_, scores, _PLAIN_SCORES)):
        options |= {**additions(scores), "scale": scores.scale}
    if not all(map(is_, places, _PLAIN_PLACES)):
        options |= placement(places, k)
    return options


def placement(places: Places, k: Tensor) -> dict[str, Any]:
    """Where tokens stand, and which keys there are."""
    return {
        "key_padding": _key_padding(places.key_padding, k),
        "query_offset": _offset("query_offset", places.query_offset),
        "key_offset": _offset("key_offset", places.key_offset),
    }


def precision() -> str:
    """The precision of f32 products: that of torch's own on a CPU (``torch.set_float32_matmul_precision``).
    What torch calls medium, one bf16 product per product, is high here."""
    try:
        name = torch.get_float32_matmul_precision()
    except RuntimeError:
        # It was set for backends one by one, which torch 2.9 and later can.
        name = torch.backends.mkldnn.matmul.fp32_precision
    return "high" if name in _REDUCED else "highest"


def additions(scores: Scores) -> dict[str, Any]:
    """Options of scores and probabilities that differ from call to call."""
    return {
        "softcap": scores.softcap,
        "sink_logits": _list(scores.sink_logits),
        "alibi_slopes": _list(scores.alibi_slopes),
        "bias_table": None if scores.bias_table is None else scores.bias_table.detach().numpy(),
        "bias_right": None if scores.bias_table is None else scores.bias_right,
        "dropout_p": scores.dropout_p,
        "dropout_seed": None if scores.dropout_seed is None else int(scores.dropout_seed.item()),
    }


def _list(x: Tensor | None) -> list[float] | None:
    return None if x is None else x.tolist()


def with_places(pattern: Any, places: Places, k: Tensor) -> Any:
    """The pattern with what is said in tensors: sequences, global tokens, prefixes, holes of padding."""
    if isinstance(pattern, str):
        pattern = read(pattern)
    if isinstance(pattern, longspan.Dilated):
        return _packed_branches(pattern, places, k)
    said = (places.cu_seqlens_q, places.global_tokens, places.prefix, places.key_padding)
    if all(tensor is None for tensor in said):
        return pattern
    changes = _changes(places, k)
    if all(part is None for part in changes):
        return pattern
    if pattern.heads is not None or pattern.batch is not None:
        raise ValueError(
            f"{changes.names()}: expected a pattern that is the same for all heads and batch entries, "
            "which it is put into; say it inside of heads([…]) or of the list"
        )
    if not changes.differ:
        return changes.applied(pattern, 0)
    return longspan.batch([changes.applied(pattern, entry) for entry in range(k.shape[0])])


def _packed_branches(dilated: longspan.Dilated, places: Places, k: Tensor) -> longspan.Dilated:
    """Branches of each of packed sequences; ranges of padding are an option."""
    if places.key_padding is not None and places.key_padding.dtype == torch.bool:
        ranges = _ranges("key_padding", places.key_padding, k.shape[0], k.shape[2], 0)
        for entry, row in enumerate(ranges):
            if len(row) > 1:
                raise ValueError(
                    f"key_padding has {len(row)} ranges of tokens in batch entry {entry}, expected one: "
                    "branches count within it"
                )
    if places.cu_seqlens_q is None:
        return dilated
    queries = places.cu_seqlens_q
    keys = queries if places.cu_seqlens_k is None else places.cu_seqlens_k
    for name, bounds in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys)):
        _lengths(name, bounds)  # what is wrong is an error by name
    return dilated.packed_cu_seqlens(queries.tolist(), keys.tolist())


class _Changes(NamedTuple):
    """What a pattern is put into, per batch entry; None for nothing."""

    sequences: list[tuple[list[int], list[int]]] | None
    """Of queries and keys; one for all entries, or one per entry."""
    prefix: list[int] | None
    global_tokens: list[list[tuple[int, int]]] | None
    held: list[list[tuple[int, int]]] | None
    """Ranges of keys that hold tokens, where some entry has several."""

    @property
    def differ(self) -> bool:
        """Whether entries do."""
        single = self.sequences is not None and len(self.sequences) == 1
        return not single or any(part is not None for part in self[1:])

    def names(self) -> str:
        names = ("cu_seqlens", "prefix", "global_tokens", "key_padding with holes")
        return " and ".join(name for name, part in zip(names, self) if part is not None)

    def applied(self, pattern: longspan.Pattern, entry: int) -> longspan.Pattern:
        if self.sequences is not None:
            own = self.sequences[entry if len(self.sequences) > 1 else 0]
            pattern = longspan.packed(*own, pattern)
        if self.prefix is not None:
            pattern = pattern | longspan.keys(0, self.prefix[entry])
        if self.global_tokens is not None:
            for first, end in self.global_tokens[entry]:
                pattern = pattern | longspan.keys(first, end) | longspan.queries(first, end)
        if self.held is not None:
            held = ~longspan.full()
            for first, end in self.held[entry]:
                held = held | longspan.keys(first, end)
            pattern = pattern & held
        return pattern


def _changes(places: Places, k: Tensor) -> _Changes:
    batch, tokens = k.shape[0], k.shape[2]
    sequences = prefix = global_tokens = held = None
    if places.cu_seqlens_q is not None:
        if places.prefix is not None or places.global_tokens is not None:
            raise ValueError(
                "cu_seqlens beside prefix or global_tokens, expected one of them: positions of packed "
                "sequences are those within each, so say `keys(…)` in the pattern"
            )
        rows_q = _rows("cu_seqlens_q", places.cu_seqlens_q, batch)
        same = places.cu_seqlens_k is None or places.cu_seqlens_k is places.cu_seqlens_q
        rows_k = rows_q if same else _rows("cu_seqlens_k", places.cu_seqlens_k, batch)
        if len(rows_q) != len(rows_k):
            raise ValueError(
                f"cu_seqlens have {len(rows_q)} and {len(rows_k)} rows, expected as many for queries and keys"
            )
        sequences = list(zip(rows_q, rows_k))
    offset = _offset("key_offset", places.key_offset) or 0
    if places.prefix is not None:
        x = places.prefix
        if x.dtype not in (torch.int32, torch.int64) or x.shape != (batch,) or bool((x < 0).any()):
            raise ValueError(
                f"prefix is a {_described(x)}, expected int64 of shape ({batch},), 0 or more: how many "
                "keys from the first on all queries of an entry see"
            )
        if offset < 0:
            raise ValueError(f"key_offset is {offset} beside prefix, expected 0 or more")
        prefix = [length + offset if length else 0 for length in x.tolist()]
    if places.global_tokens is not None:
        global_tokens = _ranges("global_tokens", places.global_tokens, batch, tokens, offset)
    if places.key_padding is not None and places.key_padding.dtype == torch.bool:
        ranges = _ranges("key_padding", places.key_padding, batch, tokens, offset)
        held = ranges if any(len(row) > 1 for row in ranges) else None
    return _Changes(sequences, prefix, global_tokens, held)


def _rows(name: str, bounds: Tensor, batch: int) -> list[list[int]]:
    """The lengths of sequences, for all batch entries or for each."""
    if bounds.ndim != 2:
        return [_lengths(name, bounds)]
    if bounds.shape[0] != batch:
        raise ValueError(
            f"{name} is a {_described(bounds)}, expected {batch} rows: one per batch entry, or a single "
            "list for all"
        )
    return [_lengths(name, row) for row in bounds]


def _ranges(
    name: str, mask: Tensor, batch: int, tokens: int, offset: int
) -> list[list[tuple[int, int]]]:
    """Where each row of a mask is true, by position."""
    if mask.dtype != torch.bool or mask.shape != (batch, tokens):
        raise ValueError(f"{name} is a {_described(mask)}, expected shape ({batch}, {tokens}) of bools")
    edges = torch.nn.functional.pad(mask.to(torch.int8), (1, 1)).diff(dim=1)
    found = []
    for row in edges:
        bounds = row.nonzero()[:, 0].tolist()
        if offset < 0 and bounds and (name == "global_tokens" or len(bounds) > 2):
            raise ValueError(
                f"key_offset is {offset} beside {name} with ranges of its own, expected 0 or more"
            )
        found.append([(first + offset, end + offset) for first, end in zip(bounds[::2], bounds[1::2])])
    return found


def read(pattern: longspan.Pattern | str) -> longspan.Pattern:
    """The pattern of a text."""
    if not isinstance(pattern, str):
        return pattern
    return _read(pattern) if len(pattern) <= _SHORT else longspan.Pattern(pattern)


@functools.lru_cache(maxsize=256)
def _read(text: str) -> longspan.Pattern:
    return longspan.Pattern(text)


@functools.lru_cache(maxsize=64)
def dilated(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    within: str,
    also: str | None,
    overlap: str,
) -> longspan.Dilated:
    """One object for equal branches: layers of a model share its layouts."""
    return longspan.Dilated(
        segment_lengths,
        dilation_rates,
        within=read(within),
        also=None if also is None else read(also),
        overlap=overlap,
    )


def _lengths(name: str, bounds: Tensor) -> list[int]:
    """The distances of neighbours."""
    if bounds.ndim != 1 or bounds.dtype not in (torch.int32, torch.int64) or not len(bounds):
        raise ValueError(
            f"{name} is a {_described(bounds)}, expected int32 or int64 of shape (sequences + 1,): "
            "0, then where each sequence ends"
        )
    values = bounds.tolist()
    lengths = [end - start for start, end in zip(values, values[1:])]
    if values[0] != 0 or min(lengths, default=0) < 0:
        at = next((i + 1 for i, length in enumerate(lengths) if length < 0), 0)
        raise ValueError(
            f"{name}[{at}] is {values[at]}, expected "
            + ("0, where the first sequence begins" if at == 0 else f"at least {values[at - 1]}, "
               "the number before it")
        )
    return lengths


def _offset(name: str, offset: int | Tensor | None) -> int | None:
    if not isinstance(offset, Tensor):
        return offset
    if offset.ndim != 0 or offset.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} is a {_described(offset)}, expected a number, or an int64 without axes"
        )
    return int(offset.item())


def _key_padding(padding: Tensor | None, k: Tensor) -> list[tuple[int, int]] | None:
    """The first and the end of the keys that hold tokens, for each batch entry."""
    if padding is None:
        return None
    batch, tokens = k.shape[0], k.shape[2]
    if padding.dtype == torch.bool:
        return _ranges_of_mask(padding, batch, tokens)
    if padding.dtype not in (torch.int32, torch.int64) or padding.shape != (batch, 2):
        raise ValueError(
            f"key_padding is a {_described(padding)}, expected int64 of shape ({batch}, 2), the "
            f"first key with a token and the end of them, or bool of shape ({batch}, {tokens})"
        )
    return [(first, end) for first, end in padding.tolist()]


def _ranges_of_mask(mask: Tensor, batch: int, tokens: int) -> list[tuple[int, int]]:
    if mask.shape != (batch, tokens):
        raise ValueError(
            f"key_padding is a {_described(mask)}, expected shape ({batch}, {tokens}): true where a "
            "key holds a token"
        )
    if tokens == 0:
        return [(0, 0)] * batch
    first, end = range_of_mask(mask)
    return list(zip(first.tolist(), end.tolist()))


def range_of_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The first true element of each row, and one past the last; 0 of rows without one. Holes between them are
    put into the pattern."""
    some = mask.any(1)
    first, last = mask.int().argmax(1), mask.flip(1).int().argmax(1)
    return first * some, (mask.shape[1] - last) * some


def _described(x: Tensor) -> str:
    return f"{str(x.dtype)[6:]} tensor of shape {tuple(x.shape)}"
