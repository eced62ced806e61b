"""The engines, each with the same problem and the same tensors.

Every engine allocates its results inside the timed call, as torch can't do otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import longspan
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Mask:
    """Which queries attend to which keys: a pattern's text, and the same for the engines that don't read it."""

    text: str
    width: int | None = None

    @property
    def is_causal(self) -> bool:
        return self.text == "causal"


FULL = Mask("full")
CAUSAL = Mask("causal")


def window(width: int) -> Mask:
    """Keys at most `width` away, on both sides."""
    return Mask(f"window({width}, {width})", width)


def window_of_sparsity(tokens: int, sparsity: float) -> Mask:
    """The window that leaves out this share of all pairs, as near as a whole number comes.

    A window of w has n (2 w + 1) − w (w + 1) pairs; the smaller root of that is w.
    """
    pairs = (1.0 - sparsity) * tokens * tokens
    middle = tokens - 0.5
    return window(max(1, round(middle - math.sqrt(middle * middle + tokens - pairs))))


@dataclass(frozen=True)
class Problem:
    """One shape and its mask; batch 1."""

    mask: Mask
    queries: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    # What tensors hold, as Longspan calls it.
    dtype: str = "f32"

    @staticmethod
    def square(mask: Mask, tokens: int, heads: int, dim: int, dtype: str = "f32") -> "Problem":
        return Problem(mask, tokens, tokens, heads, heads, dim, dtype)


@dataclass(frozen=True)
class Tensors:
    """What all engines read: unit normal numbers, contiguous, [batch, head, token, dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @staticmethod
    def of(problem: Problem) -> "Tensors":
        seed = torch.Generator().manual_seed(20_26)

        def make(heads: int, tokens: int) -> torch.Tensor:
            numbers = torch.randn(1, heads, tokens, problem.dim, generator=seed)
            return numbers.to(DTYPES[problem.dtype])

        q, dout = (make(problem.heads, problem.queries) for _ in range(2))
        k, v = (make(problem.kv_heads, problem.keys) for _ in range(2))
        return Tensors(q, k, v, dout)


class Sdpa:
    """torch.nn.functional.scaled_dot_product_attention: dense or causal, both passes."""

    name = "torch SDPA"

    def __init__(self, problem: Problem, tensors: Tensors) -> None:
        # Its causal mask is aligned top-left: the same as ours only for a square.
        assert problem.mask == FULL or (problem.mask == CAUSAL and problem.queries == problem.keys)
        self._causal = problem.mask.is_causal
        self._gqa = problem.heads != problem.kv_heads
        self._tensors = tensors

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self._attend(self._tensors.q, self._tensors.k, self._tensors.v)

    def backward(self) -> Callable[[], Gradients]:
        """The backward pass alone: the forward pass is done here, once, and its graph kept."""
        given = self._tensors
        inputs = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]
        out = self._attend(*inputs)

        def run() -> Gradients:
            dq, dk, dv = torch.autograd.grad(out, inputs, given.dout, retain_graph=True)
            return dq, dk, dv

        return run

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self._causal, enable_gqa=self._gqa)


class Flex:
    """torch FlexAttention, compiled, over a window: the forward pass, all it has on a CPU.

    The window's width is a constant of the compiled code, which was 5 % faster than a tensor.
    """

    def __init__(self, problem: Problem, tensors: Tensors, block: int) -> None:
        self.name = f"FlexAttention, block {block}"
        self.block = block
        self._problem = problem
        self._tensors = tensors
        # A new shape is a new compilation; after eight of them torch would go on unfused.
        self._compiled = torch.compile(flex_attention, dynamic=False)
        self._compiled_build = torch.compile(create_block_mask, dynamic=False)
        self._mask = self.build()
        self.forward()  # compiles

    @staticmethod
    def forget() -> None:
        """Drops what was compiled for other shapes. Engines made before don't survive it."""
        torch._dynamo.reset()

    def forward(self) -> torch.Tensor:
        given = self._tensors
        with torch.no_grad():
            return self._compiled(given.q, given.k, given.v, block_mask=self._mask)

    def build(self) -> BlockMask:
        """`create_block_mask` as its documentation calls it first."""
        return self._build(create_block_mask)

    def compiled_build(self) -> BlockMask:
        """`torch.compile(create_block_mask)`, which the first call compiles."""
        return self._build(self._compiled_build)

    def _build(self, create: Callable[..., BlockMask]) -> BlockMask:
        width = self._problem.mask.width
        assert width is not None

        def near(
            _batch: object, _head: object, query: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            return (query - key).abs() <= width

        lengths = (self._problem.queries, self._problem.keys)
        return create(near, None, None, *lengths, device="cpu", BLOCK_SIZE=self.block)


class Longspan:
    """Longspan, for any pattern, as the wheel has it."""

    def __init__(
        self,
        problem: Problem,
        tensors: Tensors,
        threads: int,
        isa: str | None,
        name: str = "Longspan",
    ) -> None:
        self.name = name
        self._problem = problem
        self._tensors = tensors
        layout = self.build()
        self._attention = longspan.Attention(layout, threads=threads, isa=isa)
        self.pairs = layout.active_pairs

    def build(self) -> longspan.Layout:
        """The pattern's text parsed and compiled."""
        problem = self._problem
        return longspan.Pattern(problem.mask.text).compile(problem.queries, problem.keys)

    def forward(self) -> torch.Tensor:
        out = torch.empty_like(self._tensors.q)
        self._forward(out)
        return out

    def backward(self) -> Callable[[], Gradients]:
        """The backward pass alone: the forward pass is done here, once."""
        given = self._tensors
        output = self._forward(torch.empty_like(given.q))

        def run() -> Gradients:
            found = self._attention.backward(given.q, given.k, given.v, output, given.dout)
            dq, dk, dv = map(torch.from_dlpack, found)
            return dq, dk, dv

        return run

    def _forward(self, out: torch.Tensor) -> longspan.Output:
        return self._attention.forward(self._tensors.q, self._tensors.k, self._tensors.v, out=out)
