"""What comes out: cases with their samples, and figures beside their targets."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from measure import Samples, Series, Unit


class Kind(Enum):
    """How a figure reads."""

    SHARE = "share"
    TIMES = "times"
    RATIO = "ratio"

    def show(self, value: float) -> str:
        match self:
            case Kind.SHARE:
                return f"{100 * value:.0f} %"
            case Kind.TIMES:
                return f"{value:.2f} ×" if value < 10 else f"{value:.0f} ×"
            case Kind.RATIO:
                return f"{value:.2f}"


@dataclass(frozen=True)
class Target:
    """What a figure should reach: at least, or at most where it is a cost."""

    kind: Kind
    bound: float

    @property
    def is_cost(self) -> bool:
        return self.kind is Kind.RATIO

    def show(self) -> str:
        return f"{'≤' if self.is_cost else '≥'} {self.kind.show(self.bound).replace('.00', '')}"

    def met(self, value: float) -> bool:
        return value <= self.bound if self.is_cost else value >= self.bound


# By head dim.
Targets = dict[int, Target]


def _shares(d64: float, d128: float) -> Targets:
    return {64: Target(Kind.SHARE, d64), 128: Target(Kind.SHARE, d128)}


def _times(d64: float, d128: float) -> Targets:
    return {64: Target(Kind.TIMES, d64), 128: Target(Kind.TIMES, d128)}


def _at_most(bound: float) -> Targets:
    return dict.fromkeys((64, 128), Target(Kind.RATIO, bound))


@dataclass(frozen=True)
class Goals:
    """What is asked of the kernels for tensors of one type."""

    # Share of the FMA peak, dense.
    forward_peak: Targets | None
    backward_peak: Targets | None
    forward_sdpa: Targets
    backward_sdpa: Targets
    flex: Targets
    flex_and_build: Targets | None
    # Errors, as a multiple of torch's.
    errors: Targets | None


# What is asked of the kernels.
GOALS = {
    "f32": Goals(
        forward_peak=_shares(0.75, 0.85),
        backward_peak=_shares(0.70, 0.78),
        forward_sdpa=_times(1.4, 1.3),
        backward_sdpa=_times(1.2, 1.2),
        flex=_times(3.0, 3.0),
        flex_and_build=_times(20.0, 20.0),
        errors=None,
    ),
    "bf16": Goals(
        forward_peak=None,
        backward_peak=None,
        forward_sdpa=_times(1.8, 1.8),
        backward_sdpa=_times(3.2, 3.2),
        flex=_times(3.0, 3.0),
        flex_and_build=None,
        errors=_at_most(1.0),
    ),
}
LINEAR = {65_536: _at_most(1.15), 16_384: _at_most(1.4)}
THREADS = _times(1.8, 1.8)
DECODE_ONE = _shares(0.75, 0.75)
DECODE_MANY = _shares(0.65, 0.65)


@dataclass(frozen=True)
class Figure:
    """A figure: by the best of each side and by their medians."""

    what: str
    tokens: int
    dim: int
    kind: Kind
    best: float
    median: float
    target: Target | None = None

    @property
    def verdict(self) -> str:
        if self.target is None:
            return "reported"
        return "met" if self.target.met(self.best) else "missed"


@dataclass
class Case:
    """Contestants that ran in the same rounds, and the work of one call."""

    what: str
    tokens: int
    dim: int
    heads: int
    # Floating-point operations of a call on active pairs alone, by contestant.
    flops: dict[str, float]
    samples: Samples
    # Pattern, share of active pairs, and whatever else a reader should know.
    notes: dict[str, object] = field(default_factory=dict)

    def rate(self, name: str) -> float | None:
        """Best GFLOP/s of a contestant, where it has operations to count."""
        series = self.samples.series[name]
        if series.unit is not Unit.SECONDS:
            return series.best
        return self.flops[name] / series.best / 1e9 if name in self.flops else None

    def figure(
        self,
        what: str,
        kind: Kind,
        numerator: tuple[str, ...],
        denominator: tuple[str, ...],
        targets: Targets | None,
        factor: float = 1.0,
    ) -> Figure:
        """`factor` × the sum of some series over the sum of others."""

        def value(of: Callable[[Series], float]) -> float:
            over, under = (
                sum(of(self.samples.series[name]) for name in names)
                for names in (numerator, denominator)
            )
            return factor * over / under

        return self._figure(what, kind, value, targets)

    def share_of(
        self, what: str, limit: str, name: str, work: float, targets: Targets | None
    ) -> Figure:
        """`work` (in units of 10⁹) over the time of `name`, as a share of a measured rate."""

        def value(of: Callable[[Series], float]) -> float:
            return work / 1e9 / of(self.samples.series[name]) / of(self.samples.series[limit])

        return self._figure(what, Kind.SHARE, value, targets)

    def _figure(
        self,
        what: str,
        kind: Kind,
        value: Callable[[Callable[[Series], float]], float],
        targets: Targets | None,
    ) -> Figure:
        best, median = (value(operator.attrgetter(which)) for which in ("best", "median"))
        target = targets.get(self.dim) if targets else None
        return Figure(what, self.tokens, self.dim, kind, best, median, target)
