"""The compiled part of the package."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, final, overload

import numpy

from longspan._results import Gradients, Output

__all__ = [
    "Array",
    "Dilated",
    "Layout",
    "Pattern",
    "Ring",
    "RingError",
    "__version__",
    "attention",
    "backward",
    "blocks",
    "blocks_dilated",
    "butterfly",
    "cache_stats",
    "causal",
    "dilated",
    "documents",
    "forward",
    "full",
    "global_tokens",
    "heads",
    "hierarchical",
    "packed",
    "random",
    "raw_backward",
    "raw_forward",
    "ring_check",
    "ring_gather",
    "ring_shards",
    "sinks",
    "sliding_window",
    "strided",
    "window",
]
__version__: str

class _Tensor(Protocol):
    """A NumPy array, or any tensor that has DLPack, in the CPU's memory."""

    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

_Order = Literal["bhsd", "bshd"]
_Isa = Literal["portable", "neon", "avx2", "avx512", "amx"]
_Precision = Literal["fastest", "exact"]
_Counting = Literal["each branch", "once"]
_What = Pattern | str | Layout | Dilated
#: A torch.device, or its name.
_Device = Any
_Width = Literal["all", "longest"]
#: (address, shape, strides, name of the type)
_Raw = tuple[int, Sequence[int], Sequence[int], str]

@final
class Pattern:
    def __new__(cls, text: str) -> Pattern: ...
    @property
    def heads(self) -> int | None: ...
    def allows(self, query: int, key: int, *, head: int | None = None) -> bool: ...
    def compile(
        self,
        tokens_q: int,
        tokens_k: int | None = None,
        *,
        block: int | None = None,
        query_offset: int | None = None,
        key_offset: int | None = None,
        key_ranges: Sequence[tuple[int, int]] | None = None,
        max_work: int | None = None,
    ) -> Layout: ...
    def to_block_mask(
        self,
        tokens_q: int,
        tokens_k: int | None = None,
        *,
        device: _Device = "cpu",
        block: int = 128,
        query_offset: int | None = None,
        key_offset: int | None = None,
        key_ranges: Sequence[tuple[int, int]] | None = None,
        width: _Width = "all",
    ) -> Any: ...
    def __and__(self, other: Pattern, /) -> Pattern: ...
    def __or__(self, other: Pattern, /) -> Pattern: ...
    def __rand__(self, other: Pattern, /) -> Pattern: ...
    def __ror__(self, other: Pattern, /) -> Pattern: ...
    def __invert__(self) -> Pattern: ...
    def __copy__(self) -> Pattern: ...
    def __deepcopy__(self, _memo: Any) -> Pattern: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def _repr_svg_(self) -> str | None: ...

@final
class Layout:
    @property
    def tokens_q(self) -> int: ...
    @property
    def tokens_k(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def batch(self) -> int | None: ...
    @property
    def heads(self) -> int | None: ...
    @property
    def density(self) -> float: ...
    @property
    def active_blocks(self) -> int: ...
    @property
    def active_pairs(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def to_block_mask(self, device: _Device = "cpu", *, width: _Width = "all") -> Any: ...
    def _block_lists(self, width: _Width) -> tuple[numpy.ndarray, ...]: ...
    def _source(
        self,
    ) -> tuple[Pattern, tuple[int, int], list[tuple[int, int]] | None]: ...
    def __copy__(self) -> Layout: ...
    def __deepcopy__(self, _memo: Any) -> Layout: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def _repr_svg_(self) -> str: ...

@final
class Array:
    @property
    def shape(self) -> tuple[int, int, int, int]: ...
    @property
    def dtype(self) -> str: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Dilated:
    def __new__(
        cls,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        within: Pattern | str | None = "full",
        also: Pattern | str | None = None,
        counting: _Counting = "each branch",
    ) -> Dilated: ...
    @property
    def segment_lengths(self) -> list[int]: ...
    @property
    def dilation_rates(self) -> list[int]: ...
    @property
    def within(self) -> Pattern: ...
    @property
    def also(self) -> Pattern | None: ...
    @property
    def counting(self) -> _Counting: ...
    def __copy__(self) -> Dilated: ...
    def __deepcopy__(self, _memo: Any) -> Dilated: ...
    def __getnewargs_ex__(
        self,
    ) -> tuple[tuple[list[int], list[int]], dict[str, str | None]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

class RingError(RuntimeError): ...

class _Post(Protocol):
    """What carries a ring's messages; those are given as (rank, address, length)."""

    rank: int
    size: int
    def start(
        self, sends: list[tuple[int, int, int]], receives: list[tuple[int, int, int]]
    ) -> None: ...
    def failed(self) -> bool: ...
    def wait(self, patience: float) -> tuple[Any, ...] | None: ...

@final
class Ring:
    def __new__(
        cls,
        post: _Post,
        pattern: Pattern | str,
        shards: str,
        tokens: int,
        sizes: tuple[int, int, int, int, int],
        dtype: str,
        scale: float | None,
        softcap: float | None,
        threads: int,
        patience: float,
    ) -> Ring: ...
    def forward(
        self, q: _Raw, k: _Raw, v: _Raw, out: _Raw, lse: _Raw, lse_rest: _Raw
    ) -> None: ...
    def backward(
        self,
        q: _Raw,
        k: _Raw,
        v: _Raw,
        out: _Raw,
        lse: _Raw,
        lse_rest: _Raw,
        dout: _Raw,
        dlse: _Raw | None,
        dq: _Raw,
        dk: _Raw,
        dv: _Raw,
    ) -> None: ...
    def traffic(self) -> tuple[int, int]: ...

def full() -> Pattern: ...
def causal() -> Pattern: ...
def window(left: int, right: int) -> Pattern: ...
def sliding_window(width: int) -> Pattern: ...
def sinks(tokens: int) -> Pattern: ...
def global_tokens(tokens: int) -> Pattern: ...
def dilated(segment: int, rate: int, offset: int = 0) -> Pattern: ...
def strided(stride: int) -> Pattern: ...
def hierarchical(levels: Sequence[tuple[int, int, int]]) -> Pattern: ...
def documents(lengths: Sequence[int]) -> Pattern: ...
def packed(
    query_lengths: Sequence[int], key_lengths: Sequence[int], inner: Pattern | str
) -> Pattern: ...
def blocks_dilated(block: int, rates: Sequence[int]) -> Pattern: ...
def butterfly(block: int) -> Pattern: ...
def random(block: int, per_row: int, blocks: int, seed: int) -> Pattern: ...
def blocks(block: int, rows: Sequence[Sequence[int | tuple[int, int]]]) -> Pattern: ...
def heads(patterns: Sequence[Pattern | str]) -> Pattern: ...
@overload
def attention(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    pattern: _What,
    *,
    order: _Order | None = "bhsd",
    block: int | None = None,
    out: _Tensor | None = None,
    return_lse: Literal[False] = False,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Sequence[float] | numpy.ndarray | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_ranges: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> Any: ...
@overload
def attention(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    pattern: _What,
    *,
    order: _Order | None = "bhsd",
    block: int | None = None,
    out: _Tensor | None = None,
    return_lse: Literal[True],
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Sequence[float] | numpy.ndarray | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_ranges: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> tuple[Any, numpy.ndarray]: ...
def forward(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    pattern: _What,
    *,
    order: _Order | None = "bhsd",
    block: int | None = None,
    out: _Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Sequence[float] | numpy.ndarray | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_ranges: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> Output: ...
def backward(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    output: Output | tuple[_Tensor, _Tensor],
    dout: _Tensor,
    pattern: _What,
    *,
    dlse: _Tensor | None = None,
    order: _Order | None = "bhsd",
    block: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Sequence[float] | numpy.ndarray | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_ranges: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> Gradients: ...
def raw_forward(
    q: _Raw,
    k: _Raw,
    v: _Raw,
    out: _Raw,
    lse: _Raw,
    lse_rest: _Raw | None,
    pattern: _What,
    **options: Any,
) -> None: ...
def raw_backward(
    q: _Raw,
    k: _Raw,
    v: _Raw,
    out: _Raw,
    lse: _Raw,
    lse_rest: _Raw | None,
    dout: _Raw,
    dlse: _Raw | None,
    dq: _Raw,
    dk: _Raw,
    dv: _Raw,
    pattern: _What,
    **options: Any,
) -> None: ...
def ring_check(pattern: Pattern | str, tokens: int, heads: int) -> None: ...
def ring_gather(post: _Post, mine: bytes, patience: float) -> list[bytes]: ...
def ring_shards(shards: str, tokens: int, ranks: int) -> list[list[tuple[int, int, int]]]: ...
def cache_stats() -> dict[str, int]: ...
