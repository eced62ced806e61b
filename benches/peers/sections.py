"""What is measured, section by section.

A section is a list of steps; a step measures one or two cases and leaves them, with the figures
they give, in the results.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from longspan import limits

import agreement
from engines import (
    CAUSAL,
    DTYPES,
    FULL,
    Flex,
    Longspan,
    Mask,
    Problem,
    Sdpa,
    Tensors,
    window_of_sparsity,
)
from figures import (
    DECODE_MANY,
    DECODE_ONE,
    GOALS,
    LINEAR,
    THREADS,
    Case,
    Figure,
    Goals,
    Kind,
    Targets,
)
from measure import Budget, Contestant, Inspect, Unit, interleave

HEADS = 8
# One dense call of 65,536 tokens is 1.1 TFLOP a head at d 64: two heads, one a thread.
LONG, LONG_HEADS = 65_536, 2
SPARSITIES = (0.90, 0.95, 0.99)
DECODE_KEYS, DECODE_KV_HEADS = 1 << 20, 2
ONE_HEAD = (Mask("causal & (window(1024, 0) | sinks(64))"), Mask("global_tokens(64)"))

# A matrix product that torch does as well as it can: 2048 × 2048 × 2048.
PRODUCT_SIDE = 2_048

PEAK, BANDWIDTH = "FMA peak", "read bandwidth"
AMX_PEAK, PRODUCT = "AMX peak", f"torch matmul, {PRODUCT_SIDE}³"
SDPA, LONGSPAN = Sdpa.name, "Longspan"
LAYOUT, MASK = "Longspan's layout build", "create_block_mask"
COMPILED_MASK = "create_block_mask, compiled"

Call = Callable[[], object]


@dataclass(frozen=True)
class Pass:
    """What differs between the two passes."""

    name: str
    # Matrix products per block, each two operations per pair and dim.
    products: int
    rounding: float

    def flops(self, problem: Problem, pairs: int) -> float:
        return 2.0 * self.products * problem.dim * pairs * problem.heads


FORWARD = Pass("forward", 2, agreement.FORWARD)
BACKWARD = Pass("backward", 5, agreement.BACKWARD)


@dataclass(frozen=True)
class Settings:
    tokens: tuple[int, ...]
    long_tokens: tuple[int, ...]
    dims: tuple[int, ...]
    threads: int
    isa: str | None
    dtype: str
    flex_blocks: tuple[int, ...]
    budget: Budget


@dataclass
class Bench:
    """The settings, and what has been found so far."""

    settings: Settings
    cases: list[Case] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    @property
    def goals(self) -> Goals:
        return GOALS[self.settings.dtype]

    def longspan(self, problem: Problem, tensors: Tensors) -> Longspan:
        settings = self.settings
        return Longspan(problem, tensors, settings.threads, settings.isa)

    def peak(self) -> Contestant:
        threads, isa = self.settings.threads, self.settings.isa
        return Contestant(PEAK, lambda: limits.fma_peak(threads, isa), Unit.GFLOPS)

    def limits(self) -> list[Contestant]:
        """What the machine can do with numbers of the dtype."""
        threads = self.settings.threads
        found = [self.peak()]
        if self.settings.dtype != "bf16":
            return found
        if (self.settings.isa or limits.best_isa()) == "amx":
            found.append(Contestant(AMX_PEAK, lambda: limits.amx_peak(threads), Unit.GFLOPS))
        return [*found, Contestant(PRODUCT, self._product(), Unit.GFLOPS)]

    def _product(self) -> Callable[[], float]:
        side = PRODUCT_SIDE
        a, b = (torch.randn(side, side).to(DTYPES[self.settings.dtype]) for _ in range(2))

        def rate() -> float:
            start = time.perf_counter()
            torch.mm(a, b)
            return 2.0 * side**3 / (time.perf_counter() - start) / 1e9

        return rate

    def shares(self, case: Case, what: str, work: float, targets: Targets | None) -> list[Figure]:
        """Longspan's rate as a share of each limit that ran; the target is that of the FMA peak."""
        return [
            case.share_of(f"{what}: share of {the}", limit, LONGSPAN, work, goal)
            for limit, the, goal in (
                (PEAK, "the FMA peak", targets),
                (AMX_PEAK, "the AMX peak", None),
                (PRODUCT, PRODUCT, None),
            )
            if limit in case.samples.series
        ]

    def bandwidth(self, data: torch.Tensor) -> Contestant:
        threads, numbers = self.settings.threads, data.numpy()
        return Contestant(
            BANDWIDTH, lambda: limits.read_bandwidth(numbers, threads), Unit.GBYTES
        )

    def run(
        self,
        what: str,
        problem: Problem,
        contestants: list[Contestant],
        flops: dict[str, float],
        inspect: Inspect | None = None,
        **notes: object,
    ) -> Case:
        samples = interleave(contestants, self.settings.budget, inspect)
        notes = {"pattern": problem.mask.text} | notes
        case = Case(what, problem.keys, problem.dim, problem.heads, flops, samples, notes)
        self.cases.append(case)
        return case


@dataclass(frozen=True)
class Step:
    title: str
    run: Callable[[Bench], None]


def agree(what: str, problem: Problem, pass_: Pass) -> Inspect:
    """Fails where an engine's result isn't Longspan's, within rounding."""

    def inspect(results: dict[str, Any]) -> None:
        expected = results[LONGSPAN]
        for name, got in results.items():
            # Limits and builds don't return tensors.
            if type(got) is type(expected):
                label = f"{what}, {problem.keys:,} tokens, d {problem.dim}, {name} and Longspan"
                bound = agreement.tolerance(pass_.rounding, problem)
                agreement.require(label, as_tuple(got), as_tuple(expected), bound)

    def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
        return result if isinstance(result, tuple) else (result,)

    return inspect


def against_sdpa(mask: Mask, tokens: int, dim: int) -> Step:
    """Dense or causal, both passes, against SDPA and the peak."""
    name = "causal" if mask.is_causal else "dense"

    def run(bench: Bench) -> None:
        problem = Problem.square(mask, tokens, HEADS, dim, bench.settings.dtype)
        tensors = Tensors.of(problem)
        ours, theirs = bench.longspan(problem, tensors), Sdpa(problem, tensors)
        duel(bench, FORWARD, problem, ours.pairs, (ours.forward, theirs.forward))
        duel(bench, BACKWARD, problem, ours.pairs, (ours.backward(), theirs.backward()))

    def duel(
        bench: Bench, pass_: Pass, problem: Problem, pairs: int, calls: tuple[Call, Call]
    ) -> None:
        what = f"{pass_.name}, {name}"
        work = pass_.flops(problem, pairs)
        contestants = [Contestant(*x) for x in zip((LONGSPAN, SDPA), calls, strict=True)]
        case = bench.run(
            what,
            problem,
            [*bench.limits(), *contestants],
            {SDPA: work, LONGSPAN: work},
            agree(what, problem, pass_),
        )
        goals = bench.goals
        share, sdpa = {
            FORWARD: (goals.forward_peak, goals.forward_sdpa),
            BACKWARD: (goals.backward_peak, goals.backward_sdpa),
        }[pass_]
        bench.figures += [
            *bench.shares(case, what, work, share if mask == FULL else None),
            case.figure(f"{what}: against {SDPA}", Kind.TIMES, (SDPA,), (LONGSPAN,), sdpa),
        ]

    return Step(f"{name}, {tokens:,} tokens, d {dim}", run)


def against_flex(sparsity: float, tokens: int, dim: int) -> Step:
    """A window, forward, against FlexAttention at its better block size, masks counted or not."""
    name = f"{100 * sparsity:.0f} % sparse window"

    def run(bench: Bench) -> None:
        mask = window_of_sparsity(tokens, sparsity)
        problem = Problem.square(mask, tokens, HEADS, dim, bench.settings.dtype)
        tensors = Tensors.of(problem)
        ours = bench.longspan(problem, tensors)
        Flex.forget()
        rivals = [Flex(problem, tensors, block) for block in bench.settings.flex_blocks]
        work = FORWARD.flops(problem, ours.pairs)
        contestants = [*bench.limits(), Contestant(LONGSPAN, ours.forward)]
        contestants += [Contestant(rival.name, rival.forward) for rival in rivals]
        # Evaluating all pairs takes what it takes, whatever the block size: one stands for both.
        builder = rivals[-1]
        builder.compiled_build()
        contestants += [
            Contestant(LAYOUT, ours.build),
            Contestant(MASK, builder.build, rounds=2),
            Contestant(COMPILED_MASK, builder.compiled_build),
        ]
        case = bench.run(
            f"forward, {name}",
            problem,
            contestants,
            {LONGSPAN: work} | {rival.name: work for rival in rivals},
            agree(f"forward, {name}", problem, FORWARD),
            density=ours.pairs / tokens**2,
        )
        bench.figures += compare(case, rivals, bench.goals)
        bench.figures += bench.shares(case, f"forward, {name}", work, None)

    def compare(case: Case, rivals: list[Flex], goals: Goals) -> list[Figure]:
        ours = (LONGSPAN, LAYOUT)
        theirs = min((x.name for x in rivals), key=lambda name: case.samples.series[name].best)
        whole = f"forward, {name}: against FlexAttention"
        return [
            case.figure(what, Kind.TIMES, (theirs, *build), own, targets)
            for what, build, own, targets in (
                (whole, (), (LONGSPAN,), goals.flex),
                (f"{whole}, builds counted", (MASK,), ours, goals.flex_and_build),
                (f"{whole}, builds counted, its own compiled", (COMPILED_MASK,), ours, None),
            )
        ]

    return Step(f"{name}, {tokens:,} tokens, d {dim}", run)


def against_torchs_errors(mask: Mask, dim: int) -> Step:
    """How far Longspan's results and SDPA's are from f64, on a problem that f64 can hold."""
    name = "causal" if mask.is_causal else "dense"

    def run(bench: Bench) -> None:
        problem = Problem.square(mask, agreement.SMALL, 2, dim, bench.settings.dtype)
        tensors = Tensors.of(problem)
        engines = (bench.longspan(problem, tensors), Sdpa(problem, tensors))
        ours, theirs = agreement.errors(problem, tensors, engines)
        targets = bench.goals.errors
        target = targets.get(dim) if targets else None
        for tensor, error in ours.items():
            ratio = error / theirs[tensor]
            what = f"{tensor}, {name}: error ÷ that of {SDPA} ({error:.1e} ÷ {theirs[tensor]:.1e})"
            bench.figures.append(
                Figure(what, problem.keys, dim, Kind.RATIO, ratio, ratio, target)
            )

    return Step(f"errors, {name}, {agreement.SMALL:,} tokens, d {dim}", run)


def linear(tokens: int, dim: int) -> Step:
    """Whether the time follows the active pairs: a 99 % sparse window against dense, Longspan."""
    heads = LONG_HEADS if tokens >= LONG else HEADS

    def run(bench: Bench) -> None:
        dense = Problem.square(FULL, tokens, heads, dim)
        sparse = Problem.square(window_of_sparsity(tokens, 0.99), tokens, heads, dim)
        tensors = Tensors.of(dense)
        whole, part = bench.longspan(dense, tensors), bench.longspan(sparse, tensors)
        names = ("Longspan, dense", "Longspan, 99 % sparse")
        work = {
            name: FORWARD.flops(dense, engine.pairs)
            for name, engine in zip(names, (whole, part), strict=True)
        }
        contestants = [
            bench.peak(),
            Contestant(names[0], whole.forward),
            Contestant(names[1], part.forward),
        ]
        density = part.pairs / whole.pairs
        what = "forward, 99 % sparse ÷ (share of active pairs × dense)"
        case = bench.run("forward, dense and sparse", sparse, contestants, work, density=density)
        targets = LINEAR.get(tokens)
        bench.figures.append(
            case.figure(what, Kind.RATIO, names[1:], names[:1], targets, 1.0 / density)
        )

    return Step(f"time against active pairs, {tokens:,} tokens, d {dim}", run)


def threads(mask: Mask, tokens: int, dim: int) -> Step:
    """One head, all threads against one."""

    def run(bench: Bench) -> None:
        count, isa = bench.settings.threads, bench.settings.isa
        problem = Problem.square(mask, tokens, 1, dim)
        tensors = Tensors.of(problem)
        names = ("Longspan, 1 thread", f"Longspan, {count} threads")
        one, many = (
            Longspan(problem, tensors, number, isa, name)
            for number, name in zip((1, count), names, strict=True)
        )
        for pass_, calls in (
            (FORWARD, (one.forward, many.forward)),
            (BACKWARD, (one.backward(), many.backward())),
        ):
            contestants = [Contestant(*x) for x in zip(names, calls, strict=True)]
            work = dict.fromkeys(names, pass_.flops(problem, one.pairs))
            what = f"{pass_.name}, one head, `{mask.text}`"
            case = bench.run(what, problem, contestants, work)
            title = f"{what}: {count} threads against 1"
            bench.figures.append(case.figure(title, Kind.TIMES, names[:1], names[1:], THREADS))

    return Step(f"one head, {mask.text}, {tokens:,} tokens, d {dim}", run)


def decode(queries: int, dim: int) -> Step:
    """Few queries against a long cache, its heads in groups of four."""
    name = f"{queries} {'query' if queries == 1 else 'queries'} × {DECODE_KEYS:,} keys"

    def run(bench: Bench) -> None:
        problem = Problem(FULL, queries, DECODE_KEYS, HEADS, DECODE_KV_HEADS, dim)
        tensors = Tensors.of(problem)
        ours, theirs = bench.longspan(problem, tensors), Sdpa(problem, tensors)
        work = FORWARD.flops(problem, ours.pairs)
        contestants = [
            bench.bandwidth(tensors.k) if queries == 1 else bench.peak(),
            Contestant(SDPA, theirs.forward),
            Contestant(LONGSPAN, ours.forward),
        ]
        both = {SDPA: work, LONGSPAN: work}
        case = bench.run(name, problem, contestants, both, agree(name, problem, FORWARD))
        if queries == 1:
            size = 4.0 * (tensors.k.numel() + tensors.v.numel())
            what = f"{name}: share of the read bandwidth"
            figure = case.share_of(what, BANDWIDTH, LONGSPAN, size, DECODE_ONE)
        else:
            what = f"{name}: share of the FMA peak"
            figure = case.share_of(what, PEAK, LONGSPAN, work, DECODE_MANY)
        against = case.figure(f"{name}: against {SDPA}", Kind.TIMES, (SDPA,), (LONGSPAN,), None)
        bench.figures += [figure, against]

    return Step(f"{name}, d {dim}", run)


def steps(section: str, settings: Settings) -> list[Step]:
    tokens, dims = settings.tokens, settings.dims
    match section:
        case "dense" | "causal":
            mask = FULL if section == "dense" else CAUSAL
            return [against_sdpa(mask, n, d) for n in tokens for d in dims]
        case "windows":
            return [against_flex(s, n, d) for n in tokens for d in dims for s in SPARSITIES]
        case "errors":
            return [against_torchs_errors(mask, d) for mask in (FULL, CAUSAL) for d in dims]
        case "linear":
            return [linear(n, d) for n in (*tokens, *settings.long_tokens) for d in dims]
        case "threads" if settings.threads == 1:
            return []
        case "threads":
            return [threads(mask, n, d) for mask in ONE_HEAD for n in tokens for d in dims]
        case "decode":
            return [decode(queries, d) for queries in (1, 16) for d in dims]
    raise ValueError(f"no section {section!r}")
