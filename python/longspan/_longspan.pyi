"""The compiled part of the package."""

# Over 500 lines: a stub file is that of one module, and overloads have no shorter form.

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar, final, overload

import numpy
from numpy.typing import ArrayLike, DTypeLike, NDArray

from longspan._results import Gradients, Output

__all__ = [
    "Array",
    "BlockSelector",
    "Component",
    "DeviceCall",
    "DevicePart",
    "Dilated",
    "EXECUTION_OPTIONS",
    "KeptMass",
    "KvCache",
    "Layout",
    "ListedBlocks",
    "Pattern",
    "Ring",
    "RingError",
    "RingSchedule",
    "Selection",
    "__version__",
    "amx_peak",
    "attention",
    "attention_weights",
    "backward",
    "batch",
    "best_isa",
    "blocks",
    "blocks_dilated",
    "butterfly",
    "bytes_needed",
    "cache_stats",
    "causal",
    "check_options",
    "device_calls",
    "dilated",
    "direct_forward",
    "documents",
    "fma_peak",
    "forward",
    "full",
    "global_tokens",
    "heads",
    "hierarchical",
    "jax_handlers",
    "keys",
    "layout_source",
    "neighborhood",
    "packed",
    "packed_cu_seqlens",
    "queries",
    "random",
    "raw_backward",
    "raw_forward",
    "read_bandwidth",
    "ring_check",
    "ring_gather",
    "ring_shards",
    "ring_wire",
    "scale_to_density",
    "sinks",
    "sliding_window",
    "strided",
    "tiles",
    "weights_svg",
    "window",
]
__version__: str
EXECUTION_OPTIONS: list[str]

class _Tensor(Protocol):
    """A NumPy array, or any tensor that has DLPack, in the CPU's memory."""

    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

_Scalar = TypeVar("_Scalar", bound=numpy.generic)
_Out = TypeVar("_Out", bound=_Tensor)
_Slopes = Sequence[float] | NDArray[numpy.floating[Any]]
_Table = Sequence[Sequence[float]] | NDArray[Any]
#: Positions of a shard, in the order of its tokens.
_Map = Sequence[int] | Sequence[range] | NDArray[numpy.integer[Any]]
_Integers = Sequence[int] | NDArray[numpy.integer[Any]]
_Order = Literal["bhsd", "bshd"]
_Isa = Literal["portable", "neon", "avx2", "avx512", "amx"]
_Precision = Literal["highest", "high", "widened"]
_Overlap = Literal["weighted", "union"]
_What = Pattern | str | Sequence[Pattern | str] | Layout | Dilated
#: A torch.device, or its name.
_Device = Any
_Width = Literal["all", "longest"]
#: A tensor whose type has DLPack's functions, or (address, shape, strides, name of the type).
_Raw = _Tensor | tuple[int, Sequence[int], Sequence[int], str]

@final
class Pattern:
    def __new__(cls, text: str) -> Pattern: ...
    @property
    def batch(self) -> int | None: ...
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
        query_map: _Map | None = None,
        key_map: _Map | None = None,
        key_padding: Sequence[tuple[int, int]] | None = None,
        mask_bytes: int | None = None,
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
        key_padding: Sequence[tuple[int, int]] | None = None,
        width: _Width = "all",
    ) -> Any: ...
    def __and__(self, other: Pattern | str, /) -> Pattern: ...
    def __or__(self, other: Pattern | str, /) -> Pattern: ...
    def __rand__(self, other: Pattern | str, /) -> Pattern: ...
    def __ror__(self, other: Pattern | str, /) -> Pattern: ...
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
    def components(self, batch: int = 0, head: int = 0) -> list[Component]: ...
    @staticmethod
    def from_mask(
        mask: ArrayLike, *, block: int | None = None, max_work: int | None = None
    ) -> Layout: ...
    @staticmethod
    def _from_block_lists(
        of_each: tuple[int, int],
        tokens: tuple[int, int],
        size: tuple[int, int],
        lists: Sequence[NDArray[Any]],
    ) -> Layout: ...
    def to_block_mask(self, device: _Device = "cpu", *, width: _Width = "all") -> Any: ...
    def _block_lists(self, width: _Width) -> tuple[NDArray[numpy.int32], ...]: ...
    def __copy__(self) -> Layout: ...
    def __deepcopy__(self, _memo: Any) -> Layout: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def _repr_svg_(self) -> str: ...

@final
class Component:
    @property
    def modulus(self) -> int: ...
    @property
    def segment(self) -> int | None: ...
    @property
    def queries(self) -> tuple[range, range]: ...
    @property
    def keys(self) -> tuple[range, range]: ...
    @property
    def active_pairs(self) -> int: ...

@final
class BlockSelector:
    def __new__(
        cls,
        base: Pattern | str,
        *,
        always: Pattern | str | None = None,
        mass: float = 0.95,
        block_mass: float = 0.0,
        min_blocks: int = 1,
        max_blocks: int | None = None,
        estimator: Literal["clusters", "means", "antidiagonals"] = "clusters",
        queries: int = 8,
        groups: int | None = None,
        sharing: Literal["head", "key_head"] = "head",
        dense_below: int = 1024,
        coarse_from: int = 16384,
    ) -> BlockSelector: ...
    @property
    def base(self) -> Pattern: ...
    def over(self, base: Pattern | str) -> BlockSelector: ...
    def select(
        self,
        q: _Tensor,
        k: _Tensor,
        *,
        order: _Order = "bhsd",
        block: int | None = None,
        scale: float | None = None,
        query_offset: int | None = None,
        key_offset: int | None = None,
        key_padding: Sequence[tuple[int, int]] | None = None,
        threads: int | None = None,
        isa: _Isa | None = None,
        precision: _Precision | None = None,
    ) -> Selection: ...

@final
class KvCache:
    def __new__(
        cls,
        pattern: Pattern | str | Sequence[Pattern | str],
        *,
        order: _Order = "bhsd",
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: _Slopes | None = None,
        bias_table: _Table | None = None,
        bias_right: int | None = None,
        sink_logits: _Slopes | None = None,
        dropout_p: float | None = None,
        dropout_seed: int | None = None,
        threads: int | None = None,
        isa: _Isa | None = None,
        precision: _Precision | None = None,
    ) -> KvCache: ...
    @overload
    def step(
        self,
        q: NDArray[_Scalar],
        k: _Tensor,
        v: _Tensor,
        lengths: Sequence[int] | None = None,
        *,
        out: None = None,
        return_lse: Literal[False] = False,
    ) -> NDArray[_Scalar]: ...
    @overload
    def step(
        self,
        q: NDArray[_Scalar],
        k: _Tensor,
        v: _Tensor,
        lengths: Sequence[int] | None = None,
        *,
        out: None = None,
        return_lse: Literal[True],
    ) -> tuple[NDArray[_Scalar], NDArray[numpy.float32]]: ...
    @overload
    def step(
        self,
        q: _Tensor,
        k: _Tensor,
        v: _Tensor,
        lengths: Sequence[int] | None = None,
        *,
        out: _Tensor | None = None,
        return_lse: bool = False,
    ) -> Any: ...
    def append(self, k: _Tensor, v: _Tensor, lengths: Sequence[int] | None = None) -> None: ...
    @property
    def lengths(self) -> list[int]: ...
    @property
    def slots(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def clear(self, entry: int | None = None) -> None: ...

@final
class ListedBlocks:
    def __new__(
        cls, base: Pattern | str, counts: ArrayLike, indices: ArrayLike
    ) -> ListedBlocks: ...
    def select(
        self,
        q: _Tensor,
        k: _Tensor,
        *,
        order: _Order = "bhsd",
        block: int | None = None,
        scale: float | None = None,
        query_offset: int | None = None,
        key_offset: int | None = None,
        key_padding: Sequence[tuple[int, int]] | None = None,
        threads: int | None = None,
        isa: _Isa | None = None,
        precision: _Precision | None = None,
    ) -> Selection: ...

@final
class Selection:
    @property
    def layout(self) -> Layout: ...
    @property
    def density(self) -> float: ...
    def kept_mass(self, q: _Tensor, k: _Tensor, lse: _Tensor, *, seed: int = 0) -> KeptMass: ...

@final
class KeptMass:
    @property
    def mean(self) -> float: ...
    @property
    def interval(self) -> tuple[float, float]: ...
    @property
    def sampled(self) -> NDArray[numpy.float32]: ...

@final
class Array:
    @property
    def shape(self) -> tuple[int, int, int, int]: ...
    @property
    def dtype(self) -> str: ...
    @overload
    def to_numpy(self, dtype: Literal["float32"] = "float32") -> NDArray[numpy.float32]: ...
    @overload
    def to_numpy(self, dtype: DTypeLike) -> NDArray[Any]: ...
    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[Any]: ...
    def __eq__(self, other: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    @staticmethod
    def _from_bytes(shape: tuple[int, int, int, int], bytes: bytes) -> Array: ...
    def _to_bytes(self) -> bytes: ...
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
        overlap: _Overlap = "weighted",
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
    def overlap(self) -> _Overlap: ...
    def padded(self, key_padding: Sequence[tuple[int, int]]) -> Dilated: ...
    def packed_cu_seqlens(
        self, cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int] | None = None
    ) -> Dilated: ...
    @property
    def key_padding(self) -> list[tuple[int, int]] | None: ...
    @property
    def cu_seqlens(self) -> tuple[list[int], list[int]] | None: ...
    def __copy__(self) -> Dilated: ...
    def __deepcopy__(self, _memo: Any) -> Dilated: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

#: First, step and count: of the beginnings of segments, of the tokens of each, and of heads.
_Steps = tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]
#: Progressions of positions: start, step and length, per entry.
_Positions = list[list[tuple[int, int, int]]]

@final
class DeviceCall:
    @property
    def entry(self) -> int | None: ...
    @property
    def queries(self) -> _Steps: ...
    @property
    def keys(self) -> _Steps: ...
    @property
    def whole(self) -> bool: ...
    @property
    def block(self) -> int: ...
    @property
    def masks(
        self,
    ) -> tuple[list[str], list[int], _Positions, _Positions, list[tuple[int, int]] | None]: ...
    def parts(self, long_lists: int | None = None) -> list[DevicePart]: ...

@final
class DevicePart:
    @property
    def query_tokens(self) -> tuple[int, int] | NDArray[numpy.int64] | None: ...
    @property
    def key_tokens(self) -> tuple[int, int] | NDArray[numpy.int64] | None: ...
    @property
    def lists(self) -> tuple[NDArray[numpy.int32], ...]: ...

def device_calls(
    what: Layout | Dilated,
    batch: int,
    heads: int,
    key_heads: int,
    tokens_q: int | None = None,
    tokens_k: int | None = None,
    query_offset: int | None = None,
    block: int | None = None,
) -> list[DeviceCall]: ...

class RingError(RuntimeError): ...

class _Post(Protocol):
    """What carries a ring's messages; those are given as (rank, address, length)."""

    rank: int
    size: int
    def start(
        self, sends: list[tuple[int, int, int]], receives: list[tuple[int, int, int]]
    ) -> None: ...
    def failed(self) -> bool: ...
    def wait(self, timeout: float) -> tuple[Any, ...] | None: ...

@final
class Ring:
    def __new__(
        cls,
        post: _Post,
        pattern: Pattern | Dilated | str,
        shards: str,
        tokens: int,
        sizes: tuple[int, int, int, int, int],
        dtype: str,
        scale: float | None,
        softcap: float | None,
        wire: str | float,
        threads: int,
        precision: str,
        timeout: float,
    ) -> Ring: ...
    def forward(
        self, q: _Raw, k: _Raw, v: _Raw, out: _Raw, lse: _Raw, lse_lo: _Raw, **options: Any
    ) -> None: ...
    def backward(
        self, q: _Raw, k: _Raw, v: _Raw, out: _Raw, lse: _Raw, lse_lo: _Raw,
        dout: _Raw, dlse: _Raw | None, dq: _Raw, dk: _Raw, dv: _Raw,
        wanted: Sequence[bool], **options: Any,
    ) -> tuple[bytes | None, bytes | None, bytes | None]: ...
    def traffic(self) -> tuple[int, int]: ...

_Part = tuple[str, int, int | None, str, int]
_RingStep = tuple[int, list[tuple[int, list[_Part]]], list[tuple[int, list[_Part]]], list[_Part]]
_Progressions = list[tuple[int, int, int]]

@final
class RingSchedule:
    def __new__(
        cls,
        post: _Post,
        pattern: Pattern | Dilated | str,
        shards: str,
        tokens: int,
        sizes: tuple[int, int, int, int, int],
        dtype: str,
        scale: float | None,
        softcap: float | None,
        timeout: float,
        block: int,
    ) -> RingSchedule: ...
    @property
    def forward(self) -> list[_RingStep]: ...
    @property
    def backward(self) -> list[_RingStep]: ...
    @property
    def local_keys(self) -> list[tuple[int, int, list[DeviceCall]]]: ...
    @property
    def sent_keys(self) -> list[tuple[list[int], _Progressions]]: ...
    @property
    def received_keys(
        self,
    ) -> list[tuple[list[int], int, _Progressions | None, list[DeviceCall], int]]: ...
    @property
    def sent_queries(self) -> list[tuple[list[int], _Progressions]]: ...
    @property
    def remote_queries(self) -> list[tuple[list[int], int, list[DeviceCall]]]: ...
    @property
    def bytes_needed(self) -> tuple[int, int]: ...
    @property
    def excluded_rows(self) -> bytes | None: ...

def full() -> Pattern: ...
def causal() -> Pattern: ...
def window(left: int, right: int) -> Pattern: ...
def sliding_window(width: int) -> Pattern: ...
def sinks(tokens: int) -> Pattern: ...
def global_tokens(tokens: int) -> Pattern: ...
def keys(from_: int, to: int) -> Pattern: ...
def queries(from_: int, to: int) -> Pattern: ...
def neighborhood(sizes: _Integers, radii: _Integers) -> Pattern: ...
def tiles(sizes: _Integers, tile: _Integers) -> list[range]: ...
def dilated(segment: int, rate: int, offset: int = 0) -> Pattern: ...
def strided(stride: int) -> Pattern: ...
def hierarchical(levels: Sequence[tuple[int, int, int]]) -> Pattern: ...
def documents(lengths: _Integers) -> Pattern: ...
def packed(
    query_lengths: _Integers, key_lengths: _Integers, inner: Pattern | str
) -> Pattern: ...
def packed_cu_seqlens(
    cu_seqlens_q: _Integers, cu_seqlens_k: _Integers, inner: Pattern | str
) -> Pattern: ...
def blocks_dilated(block: int, rates: _Integers) -> Pattern: ...
def butterfly(block: int) -> Pattern: ...
def random(block: int, per_row: int, blocks: int, seed: int) -> Pattern: ...
def blocks(
    block: int, rows: Sequence[Sequence[int | tuple[int, int]]] | NDArray[Any]
) -> Pattern: ...
def heads(patterns: Sequence[Pattern | str]) -> Pattern: ...
def batch(patterns: Sequence[Pattern | str]) -> Pattern: ...
@overload
def attention(
    q: NDArray[_Scalar],
    k: _Tensor,
    v: _Tensor,
    pattern: _What,
    *,
    order: _Order | None = "bhsd",
    block: int | None = None,
    out: None = None,
    return_lse: Literal[False] = False,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: _Slopes | None = None,
    bias_table: _Table | None = None,
    bias_right: int | None = None,
    sink_logits: _Slopes | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_padding: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> NDArray[_Scalar]: ...
@overload
def attention(
    q: NDArray[_Scalar],
    k: _Tensor,
    v: _Tensor,
    pattern: _What,
    *,
    order: _Order | None = "bhsd",
    block: int | None = None,
    out: None = None,
    return_lse: Literal[True],
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: _Slopes | None = None,
    bias_table: _Table | None = None,
    bias_right: int | None = None,
    sink_logits: _Slopes | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_padding: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> tuple[NDArray[_Scalar], NDArray[numpy.float32]]: ...
@overload
def attention(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    pattern: _What,
    *,
    order: _Order | None = "bhsd",
    block: int | None = None,
    out: _Out,
    return_lse: Literal[False] = False,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: _Slopes | None = None,
    bias_table: _Table | None = None,
    bias_right: int | None = None,
    sink_logits: _Slopes | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_padding: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> _Out: ...
@overload
def attention(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    pattern: _What,
    *,
    order: _Order | None = "bhsd",
    block: int | None = None,
    out: _Out,
    return_lse: Literal[True],
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: _Slopes | None = None,
    bias_table: _Table | None = None,
    bias_right: int | None = None,
    sink_logits: _Slopes | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_padding: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> tuple[_Out, NDArray[numpy.float32]]: ...
@overload
def attention(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    pattern: _What,
    *,
    order: _Order | None = "bhsd",
    block: int | None = None,
    out: None = None,
    return_lse: Literal[False] = False,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: _Slopes | None = None,
    bias_table: _Table | None = None,
    bias_right: int | None = None,
    sink_logits: _Slopes | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_padding: Sequence[tuple[int, int]] | None = None,
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
    out: None = None,
    return_lse: Literal[True],
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: _Slopes | None = None,
    bias_table: _Table | None = None,
    bias_right: int | None = None,
    sink_logits: _Slopes | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_padding: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> tuple[Any, NDArray[numpy.float32]]: ...
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
    return_lse: bool,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: _Slopes | None = None,
    bias_table: _Table | None = None,
    bias_right: int | None = None,
    sink_logits: _Slopes | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_padding: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> Any: ...
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
    alibi_slopes: _Slopes | None = None,
    bias_table: _Table | None = None,
    bias_right: int | None = None,
    sink_logits: _Slopes | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_padding: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> Output: ...
def backward(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    output: Output | tuple[_Tensor, _Tensor] | tuple[_Tensor, _Tensor, _Tensor],
    dout: _Tensor,
    pattern: _What | None = None,
    *,
    dlse: _Tensor | None = None,
    order: _Order | None = None,
    block: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: _Slopes | None = None,
    bias_table: _Table | None = None,
    bias_right: int | None = None,
    sink_logits: _Slopes | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_padding: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> Gradients: ...
def bytes_needed(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    pattern: _What,
    *,
    backward: bool = False,
    order: _Order | None = "bhsd",
    block: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: _Slopes | None = None,
    bias_table: _Table | None = None,
    bias_right: int | None = None,
    sink_logits: _Slopes | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_padding: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> int: ...
def attention_weights(
    q: _Tensor,
    k: _Tensor,
    pattern: _What,
    rows: _Integers,
    *,
    heads: _Integers | None = None,
    batch: _Integers | None = None,
    max_bytes: int | None = 1073741824,
    order: _Order | None = "bhsd",
    block: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: _Slopes | None = None,
    bias_table: _Table | None = None,
    bias_right: int | None = None,
    sink_logits: _Slopes | None = None,
    dropout_p: float | None = None,
    dropout_seed: int | None = None,
    query_offset: int | None = None,
    key_offset: int | None = None,
    key_padding: Sequence[tuple[int, int]] | None = None,
    threads: int | None = None,
    isa: _Isa | None = None,
    precision: _Precision | None = None,
) -> NDArray[numpy.float32]: ...
def weights_svg(weights: _Tensor) -> str: ...
def scale_to_density(
    pattern: str,
    tokens: int,
    density: float,
    *,
    tokens_k: int | None = None,
    low: int | None = None,
    high: int | None = None,
    block: int | None = None,
    max_work: int | None = None,
) -> tuple[int, Pattern]: ...
def best_isa() -> str: ...
def fma_peak(threads: int = 1, isa: _Isa | None = None) -> float: ...
def amx_peak(threads: int = 1) -> float | None: ...
def read_bandwidth(data: _Tensor, threads: int) -> float: ...
def raw_forward(
    q: _Raw, k: _Raw, v: _Raw, out: _Raw, lse: _Raw | None, lse_lo: _Raw | None,
    pattern: _What, threads: int | None = None, precision: _Precision | None = None,
    **options: Any,
) -> None: ...
def raw_backward(
    q: _Raw, k: _Raw, v: _Raw, out: _Raw, lse: _Raw, lse_lo: _Raw | None,
    dout: _Raw, dlse: _Raw | None, dq: _Raw, dk: _Raw, dv: _Raw,
    pattern: _What, wanted: Sequence[bool] = ..., threads: int | None = None,
    precision: _Precision | None = None, **options: Any,
) -> tuple[bytes | None, bytes | None, bytes | None]: ...
def direct_forward(q: _Out, k: _Out, v: _Out, pattern: Pattern, enable_gqa: bool) -> _Out | None: ...
def check_options(
    pattern: _What, **options: Any
) -> tuple[Pattern | Layout | Dilated, dict[str, Any]]: ...
def layout_source(
    layout: Layout,
) -> tuple[Pattern, tuple[int, int], list[tuple[int, int]] | None]: ...
def ring_check(pattern: Pattern | Dilated | str, tokens: int, batch: int, heads: int) -> None: ...
def ring_gather(post: _Post, mine: bytes, timeout: float) -> list[bytes]: ...
def ring_wire(wire: str | float) -> None: ...
def ring_shards(
    shards: str, tokens: int, ranks: int, pattern: Pattern | Dilated | str | None = None
) -> list[list[tuple[int, int, int]]]: ...
def jax_handlers() -> list[tuple[str, int]]: ...
def cache_stats() -> dict[str, int]: ...
