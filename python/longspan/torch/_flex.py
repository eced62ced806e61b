"""FlexAttention's kernels as an engine: torch generates them for the device, from block lists and a mask.

torch's higher-order operators take the final statistics of rows in their backward pass and have a gradient for
the log-sum-exp, which the public function hides. So partial softmaxes over components, branches and hops of a
ring are joined here (``_partials``), and each call's gradients are those of the joint softmax.

- Operators run inside of compiled regions alone; outside of them torch would materialize all scores.
- A compiled function is for one structure of a mask and one kind of tensors; everything that is a number (offsets,
  windows, lengths, slopes) is a tensor, so calls of all lengths share one compilation, or two where torch first
  assumes that a length stays the same.
- torch's log-sum-exp is to base 2 here. It is converted in this file and nowhere else.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from longspan import _mask_mod
from longspan.torch import _flex_support
from longspan.torch._call_cache import Call
from longspan.torch._device_engine import DeviceEngine
from longspan.torch._run import Scores

_LN2 = math.log(2)

#: What every call of the operators has. Tile sizes are torch's choice for the device.
_OPTIONS: dict[str, Any] = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}

#: Queries below which FlexAttention has a kernel that splits keys over the device.
_DECODE = 128
_DECODE_BACKEND = "TRITON_DECODE"

_numbers = itertools.count()


class Kernel(NamedTuple):
    """What a compiled function is for. Within one, lengths differ and little else, so that torch compiles each
    once or twice."""

    source: str
    """Of the mask."""
    block: int
    scale: float
    softcap: float | None
    bias_right: int | None
    """None without a bias table."""
    slopes: bool
    backend: str
    shape: tuple[Any, ...]
    """Element type, heads, head dims, and which sizes are one, for which torch compiles anew."""


class FlexEngine(DeviceEngine):
    """Attention by FlexAttention's generated kernels."""

    name = "FlexAttention"

    def __init__(
        self,
        backend: str | Callable[..., Any] = "inductor",
        dynamic: bool | None = None,
        options: dict[str, Any] | None = None,
    ):
        """``backend`` and ``dynamic`` are those of ``torch.compile``, ``options`` more of the operators' kernel
        options. All are for tests: on a GPU the defaults are what is supported."""
        super().__init__()
        self.backend, self.dynamic, self.options = backend, dynamic, {**_OPTIONS, **(options or {})}
        self._forward = functools.lru_cache(maxsize=None)(self._compiled_forward)
        self._backward = functools.lru_cache(maxsize=None)(self._compiled_backward)

    def _kernel_options(self, kernel: Kernel) -> dict[str, Any]:
        options = {**self.options, "BACKEND": kernel.backend}
        if kernel.backend == _DECODE_BACKEND:
            # torch decides whether rows need a check by the tile that it would choose, not by a given one.
            options.pop("fwd_BLOCK_M", None)
        return options

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        _flex_support.check_call(q, k, v)
        if q.device.type == "cuda":
            _flex_support.check_device(q.device, self)

    def attend(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, scores: Scores, saves: bool
    ) -> tuple[Tensor, Tensor]:
        kernel = self._kernel(call, q, k, v, scores, decodes=not saves)
        learned = (scores.bias_table, scores.alibi_slopes)
        out, lse = self._forward(kernel)((q, k, v), (), call, learned)
        return out, lse.double() * _LN2

    def differentiate(
        self,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: tuple[Tensor, Tensor, Tensor, Tensor | None],
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, dout, dlse = rows
        kernel = self._kernel(call, q, k, v, scores, decodes=False)
        dlse = lse.new_zeros(lse.shape, dtype=torch.float32) if dlse is None else dlse * _LN2
        rows = (out, (lse / _LN2).float(), dout, dlse)
        learned = (scores.bias_table, scores.alibi_slopes)
        with torch.enable_grad(), _autograd(), _flex_support.score_gradients(scores.softcap is not None):
            return self._backward(kernel)((q, k, v), rows, call, learned)

    def _kernel(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, scores: Scores, *, decodes: bool
    ) -> Kernel:
        (batch, heads, queries, dim), key_heads, keys = q.shape, k.shape[1], k.shape[2]
        group = heads // key_heads
        few = queries < _DECODE
        mask_heads = call.lists[0].shape[1]
        # The conditions of torch's decode kernel; it has one list for all query heads of a key head.
        decodes &= few and group & (group - 1) == 0 and (mask_heads == 1 or group == 1)
        ones = (batch == 1, queries == 1, keys == 1, few, call.lists[0].shape[0] == 1, mask_heads == 1)
        return Kernel(
            call.source,
            call.block,
            dim**-0.5 if scores.scale is None else float(scores.scale),
            scores.softcap,
            None if scores.bias_table is None else scores.bias_right,
            scores.alibi_slopes is not None,
            _DECODE_BACKEND if decodes else "TRITON",
            # The decode kernel takes a number of batch entries as a constant.
            (q.dtype, heads, key_heads, dim, v.shape[3], *ones, batch if decodes else None),
        )

    def _compiled_forward(self, kernel: Kernel) -> Compiled:
        block, scale, unused = kernel.block, kernel.scale, _flex_support.unused_lists()
        options = self._kernel_options(kernel)
        mask_of, score_of = _mods(kernel)
        flex_attention = torch.ops.higher_order.flex_attention

        def forward(qkv, rows, lists, numbers, tables, learned):
            _compiled_region()
            q, k, v = qkv
            mask, score = mask_of(numbers, tables), score_of(numbers, tables, *learned)
            blocks = (q.shape[2], k.shape[2], *lists, *unused, block, block, mask)
            # Dynamo takes these seven arguments: tensors of the mask are those of an enclosing function.
            return flex_attention(q, k, v, score, blocks, scale, options)[:2]

        return self._compile(forward)

    def _compiled_backward(self, kernel: Kernel) -> Compiled:
        block, scale, unused = kernel.block, kernel.scale, _flex_support.unused_lists()
        options = self._kernel_options(kernel)
        mask_of, score_of = _mods(kernel)
        flex_attention_backward = torch.ops.higher_order.flex_attention_backward

        def backward(qkv, rows, lists, numbers, tables, learned):
            _compiled_region()
            q, k, v = qkv
            mask, score = mask_of(numbers, tables), score_of(numbers, tables, *learned)
            blocks = (q.shape[2], k.shape[2], *lists, *unused, block, block, mask)
            # None: torch derives the gradient of the score function.
            return flex_attention_backward(
                q, k, v, *rows, score, None, blocks, scale, options, (), ()
            )[:3]

        return self._compile(backward)

    def _compile(self, function: Callable[..., Any]) -> Compiled:
        # Dynamo counts compilations per code object, and gives up after some; sizes that were seen to differ it
        # keeps per name. Each function has its own of both.
        name = f"{function.__name__}_{next(_numbers)}"
        own = types.FunctionType(
            function.__code__.replace(co_name=name),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        compiled = torch.compile(own, backend=self.backend, fullgraph=True, dynamic=self.dynamic)
        return Compiled(compiled, marks=self.dynamic is None)


class Compiled:
    """A compiled function. The first sizes that it is called with are constants of its kernel; once others follow,
    all sizes that may differ are variables of a second one, and not one after another."""

    def __init__(self, function: Callable[..., Any], marks: bool):
        self.function = function
        self._first: tuple[Any, ...] | None = None
        self._marks = marks

    def __call__(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        rows: tuple[Tensor, ...],
        call: Call,
        learned: tuple[Tensor | None, Tensor | None],
    ) -> Any:
        arguments = (qkv, rows, call.lists, call.numbers, call.tables, learned)
        if self._marks:
            sizes = tuple(x.shape for x in (*qkv[:2], *call.lists, call.numbers, *call.tables))
            if self._first is None:
                self._first = sizes
            elif self._first != sizes:
                self._marks = False
                for x in (*qkv, *rows):
                    torch._dynamo.maybe_mark_dynamic(x, (0, 2))
                for x in call.lists:
                    torch._dynamo.maybe_mark_dynamic(x, (0, *range(2, x.ndim)))
                for x in (call.numbers, *call.tables):
                    torch._dynamo.maybe_mark_dynamic(x, 0)
        return self.function(*arguments)


def _autograd() -> Any:
    """Inside of an operator's kernel, autograd as outside of it. No tensor of a call requires a gradient, but torch's
    compiler derives that of the score function by autograd."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    return torch._C._ForceDispatchKeyGuard(include, exclude - keys)


def _compiled_region() -> None:
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "FlexAttention outside of a compiled region would materialize all scores: unset "
            "TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE and torch._dynamo.config.disable"
        )


#: ``x[h]``. Where torch derives a score's gradient, an index written so would be read on the host.
_at = torch.ops.aten.index


def _mods(kernel: Kernel) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What makes the mask function and the score function of a kernel from tensors."""
    functions = _mask_mod.functions(kernel.source)
    mask, distance = functions.mask, functions.distance
    softcap, right, slopes_used = kernel.softcap, kernel.bias_right, kernel.slopes

    def mask_of(numbers, tables):
        return lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx, numbers, *tables)

    def score_of(numbers, tables, table, slopes):
        def score_mod(score, b, h, q_idx, kv_idx):
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if slopes_used or right is not None:
                apart = distance(b, h, q_idx, kv_idx, numbers, *tables)
                if slopes_used:
                    score = score - _at(slopes, [h]) * torch.abs(apart)
                if right is not None:
                    column = torch.clamp(apart, -right, table.shape[1] - 1 - right) + right
                    score = score + _at(table, [h, column])
            return score

        return score_mod

    return mask_of, score_of
