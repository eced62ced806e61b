"""Times Longspan against torch's attention on a device: ``python -m longspan.torch.bench --device cuda``.

Three engines on the same tensors, each over as much as it can leave out:

- Longspan: FlexAttention's kernels on CUDA tensors, its own on the CPU. ``first`` is a call whose layout, block
  lists and numbers are not known yet; ``cached`` one where they are.
- SDPA: ``scaled_dot_product_attention(is_causal=True)``, over all pairs below the diagonal.
- FlexAttention as written by hand: ``create_block_mask`` of a ``mask_mod``, then ``flex_attention``. ``mask build``
  is the time of ``create_block_mask``, which comes with every new length or pattern, as ``first`` does. It is compiled
  on CUDA, where without that it would hold a mask of all pairs.

Compilation by torch is excluded for all: each has run before it is timed. ``cached``, SDPA and FlexAttention take turns,
and the best of several rounds counts, by events of the device on CUDA (``first`` and ``mask build``, whose work is
mostly the host's, by the host's clock around a synchronization). FLOP/s are those of active pairs, which a pattern
has whoever computes it: 4 per pair and element of a head forward, 10 backward. Ratios are times over that of
Longspan's cached call: above 1, Longspan is faster.

Nothing is known of speed on GPUs: FlexAttention's kernels were interpreted on a CPU, not run on a GPU.

FlexAttention has no backward pass on CPUs: its column has a dash there. It has one where memory ran out, too.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import Tensor

import longspan
import longspan.torch
from longspan.torch._command import DTYPES, add_device, opened, synchronize, title
from longspan.torch._device_engine import DeviceEngine
from longspan.torch._engine import Engine

_RIVALS = ("sdpa", "flex")


class Subject(NamedTuple):
    """A pattern, and the same as a ``mask_mod``."""

    name: str
    pattern: Any
    counted: str
    """The pairs of any one head, as a pattern's text."""
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    by_head: bool = False


def subjects(window: int) -> list[Subject]:
    """The patterns, with a window of so many keys before the query."""
    segment, rate = 2 * window, 4
    branches = longspan.Dilated(
        [segment, rate * segment], [1, rate], within="causal", overlap="union"
    )

    def windowed(b, h, q, k):
        return (q >= k) & (q - k <= window)

    def with_sinks(b, h, q, k):
        return (q >= k) & ((q - k <= window) | (k < 64))

    def dilated(b, h, q, k):
        near = q // segment == k // segment
        far = q // (rate * segment) == k // (rate * segment)
        strided = (q % rate == h % rate) & (k % rate == h % rate)
        return (q >= k) & (near | (far & strided))

    text = f"causal & window({window}, 0)"
    sinks = f"causal & (window({window}, 0) | sinks(64))"
    union = f"causal & (dilated({segment}, 1) | dilated({rate * segment}, {rate}))"
    return [
        Subject(f"window({window}, 0)", text, text, windowed),
        Subject(f"window({window}, 0) | sinks(64)", sinks, sinks, with_sinks),
        Subject(
            f"Dilated([{segment}, {rate * segment}], [1, {rate}])", branches, union, dilated, True
        ),
    ]


class Times(NamedTuple):
    """Seconds of one pass; None where there is none."""

    first: float | None
    cached: float
    sdpa: float | None
    flex: float | None
    build: float | None


class Clock:
    """Times of calls on a device."""

    def __init__(self, device: torch.device):
        self.device = device

    def host(self, call: Callable[[], Any]) -> float:
        """With what the host does before and after."""
        synchronize(self.device)
        start = time.perf_counter()
        call()
        synchronize(self.device)
        return time.perf_counter() - start

    def events(self, call: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            return self.host(call)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def best(
        self, calls: dict[str, Callable[[], Any] | None], rounds: int
    ) -> dict[str, float | None]:
        """The shortest time of each call, in turns."""
        found: dict[str, float | None] = dict.fromkeys(calls)
        for _ in range(rounds):
            for name, call in calls.items():
                if call is not None:
                    seconds = self.events(call)
                    before = found[name]
                    found[name] = seconds if before is None else min(before, seconds)
        return found


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _where_memory_suffices(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def measured(
    subject: Subject,
    tensors: list[Tensor],
    engine: Engine,
    rivals: tuple[str, ...],
    rounds: int,
) -> dict[str, Times]:
    """Times of both passes over ``q, k, v`` and a gradient of the output."""
    q, k, v, dout = tensors
    device, tokens = q.device, q.shape[2]
    clock = Clock(device)

    def longspan_forward(q, k, v):
        return longspan.torch.attention(q, k, v, subject.pattern)

    def dense_forward(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    if isinstance(engine, DeviceEngine):
        # Compiles for this length; what the engine knows of the pattern is forgotten again.
        longspan_forward(q, k, v)
        engine.cache(device).clear()
    first = clock.host(lambda: longspan_forward(q, k, v))
    forwards: dict[str, Callable[..., Tensor] | None] = {
        "cached": longspan_forward,
        "sdpa": dense_forward if "sdpa" in rivals else None,
        "flex": None,
    }
    build = None
    if "flex" in rivals:
        forwards["flex"], build = _flex(subject, tokens, q, clock)
    passes = {}
    with torch.no_grad():
        calls = {name: _bound(call, q, k, v) for name, call in forwards.items()}
        passes["forward"] = _timed(clock, calls, rounds, first, build)

    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    gradients: dict[str, Callable[[], Any] | None] = {}
    for name, call in forwards.items():
        gradients[name] = None
        if call is not None and not (name == "flex" and device.type == "cpu"):
            out = _where_memory_suffices(functools.partial(call, *inputs))
            if out is not None:
                gradients[name] = functools.partial(
                    torch.autograd.grad, out, inputs, dout, retain_graph=True
                )
    passes["backward"] = _timed(clock, gradients, rounds, None, None)
    return passes


def _bound(call: Callable[..., Any] | None, *arguments: Tensor) -> Callable[[], Any] | None:
    return None if call is None else functools.partial(call, *arguments)


def _timed(
    clock: Clock,
    calls: dict[str, Callable[[], Any] | None],
    rounds: int,
    first: float | None,
    build: float | None,
) -> Times:
    ready: dict[str, Callable[[], Any] | None] = {}
    for name, call in calls.items():
        # Compiles, and finds out whether there is enough memory.
        done = None if call is None else _where_memory_suffices(call)
        ready[name] = None if done is None else call
    if ready["cached"] is None:
        raise RuntimeError("memory is too short for Longspan's call: pass fewer --tokens or --heads")
    best = clock.best(ready, rounds)
    return Times(first, best["cached"] or 0.0, best["sdpa"], best["flex"], build)


def _flex(
    subject: Subject, tokens: int, q: Tensor, clock: Clock
) -> tuple[Callable[..., Tensor] | None, float | None]:
    """FlexAttention's call for tensors as ``q``, and seconds to make its mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Not for CPUs, whose compiler knows no such masks.
    create = _compiled(create_block_mask) if q.device.type == "cuda" else create_block_mask
    heads = q.shape[1] if subject.by_head else None

    def build() -> Any:
        return create(subject.mask_mod, None, heads, tokens, tokens, device=str(q.device))

    # The first one compiles.
    mask = _where_memory_suffices(build)
    if mask is None:
        return None, None
    seconds = clock.host(build)
    attention = _compiled(flex_attention)
    return lambda q, k, v: attention(q, k, v, block_mask=mask), seconds


def _told(seconds: float | None, against: float | None = None) -> str:
    if seconds is None:
        return "-"
    ms = f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"
    return ms if against is None else f"{ms} ({seconds / against:.2f})"


_HEADS = ("tokens", "density", "pass", "first", "cached", "TFLOP/s", "SDPA", "FlexAttention", "mask build")


def _line(*cells: str) -> str:
    widths = (8, 9, 10, 10, 10, 9, 18, 18, 12)
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths))


def _report(
    subject: Subject,
    lengths: list[int],
    chosen: argparse.Namespace,
    device: torch.device,
    engine: Engine,
) -> None:
    """Measures a pattern at all lengths, and prints a line per pass."""
    print(f"\n{subject.name}\n{_line(*_HEADS)}", flush=True)
    for tokens in lengths:
        shape = (1, chosen.heads, tokens, chosen.head_dim)
        generator = torch.Generator().manual_seed(0)
        tensors = [
            torch.randn(shape, generator=generator).to(device, DTYPES[chosen.dtype])
            for _ in range(4)
        ]
        layout = longspan.Pattern(subject.counted).compile(tokens, tokens)
        pairs = layout.active_pairs * chosen.heads
        found = measured(subject, tensors, engine, tuple(chosen.against), chosen.rounds)
        for name, times in found.items():
            flops = (4 if name == "forward" else 10) * pairs * chosen.head_dim
            rivals = [_told(x, times.cached) for x in (times.sdpa, times.flex)]
            cells = [str(tokens), f"{layout.density:.2%}", name]
            cells += [_told(times.first), _told(times.cached), f"{flops / times.cached / 1e12:.3g}"]
            print(_line(*cells, *rivals, _told(times.build)), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m longspan.torch.bench",
        description="Time Longspan, dense SDPA and hand-written FlexAttention, forward and backward.",
        epilog="Times are milliseconds, in parentheses relative to Longspan's cached call. Compilation is excluded; "
        "first has layout and block lists, mask build is create_block_mask.",
    )
    add_device(parser)
    parser.add_argument("--tokens", type=int, nargs="+", help="(default: 8192 32768 65536)")
    parser.add_argument("--window", type=int, default=1024, help="keys (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="best of so many (default: %(default)s)")
    parser.add_argument(
        "--against", nargs="*", choices=_RIVALS, default=list(_RIVALS), help="(default: both)"
    )
    parser.add_argument("--quick", action="store_true", help="512 tokens, window 64, 2 rounds, 4 heads")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.window, chosen.rounds, chosen.heads = 64, 2, 4
    lengths = chosen.tokens or ([512] if chosen.quick else [8192, 32768, 65536])
    for name in ("tokens", "window", "heads", "rounds"):
        value = min(lengths) if name == "tokens" else getattr(chosen, name)
        if value < 1:
            parser.error(f"--{name} is {value}, expected at least 1")
    device, engine = opened(parser, chosen.device)

    print(title(device, engine))
    print(f"batch 1, {chosen.heads} heads, head dim {chosen.head_dim}, {chosen.dtype}, causal; best of {chosen.rounds}")
    print("ms (relative to cached); compilation excluded", flush=True)
    # FlexAttention is compiled per pattern, kind of length and pass; behind torch's limit it would go on unfused.
    with torch._dynamo.config.patch(_recompile_limits()):
        for subject in subjects(chosen.window):
            _report(subject, lengths, chosen, device, engine)
    return 0


def _recompile_limits() -> dict[str, object]:
    """Under the names of this torch: 2.7 and later call the limit so."""
    config = torch._dynamo.config
    if hasattr(config, "recompile_limit"):
        return {"recompile_limit": 256, "fail_on_recompile_limit_hit": True}
    return {"cache_size_limit": 256, "fail_on_cache_limit_hit": True}


if __name__ == "__main__":
    sys.exit(main())
