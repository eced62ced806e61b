"""Interleaved timing: every engine has a turn in every round, in alternating order.

The machine is shared, and what it gives changes by the minute. So nothing is compared across
rounds that are far apart: all that is compared runs in the same rounds, and what is reported is
the best of them, with the median beside it.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

# Before each turn. torch's OpenMP threads (GNU's libgomp) spin for some 7 ms after a parallel
# region. That is left as torch's users have it; the next implementation waits until they sleep.
PAUSE = 0.03

# A turn of a short call is repeated for about this long, or so many times.
TURN_SECONDS = 0.1
TURN_CALLS = 20

# A machine of which others took less than this share, for so long, counts as quiet.
QUIET_SHARE = 0.08
QUIET_SECONDS = 0.25


class Unit(Enum):
    SECONDS = "s"
    GFLOPS = "GFLOP/s"
    GBYTES = "GB/s"


@dataclass(frozen=True)
class Contestant:
    """Something with a turn in every round: an engine's call, or a limit of the machine."""

    name: str
    call: Callable[[], Any]
    unit: Unit = Unit.SECONDS
    # After so many rounds it sits out: for what takes seconds and isn't the point.
    rounds: int | None = None

    def measure(self) -> tuple[float, Any]:
        """How long a call took, and what it returned, to be freed after the clock has stopped."""
        start = time.perf_counter()
        result = self.call()
        return time.perf_counter() - start, result


@dataclass
class Series:
    """What one contestant showed, round by round."""

    name: str
    unit: Unit
    rounds: list[list[float]] = field(default_factory=list)
    # The shortest call, in seconds, whatever the unit.
    shortest: float = math.inf

    def _pick(self, values: Iterable[float]) -> float:
        return min(values) if self.unit is Unit.SECONDS else max(values)

    @property
    def best(self) -> float:
        return self._pick(value for values in self.rounds for value in values)

    @property
    def median(self) -> float:
        """Of the best of each round."""
        return statistics.median(self._pick(values) for values in self.rounds)


@dataclass(frozen=True)
class Clock:
    """Seconds of processor time since the machine started, all cores together."""

    all: float
    idle: float
    own: float

    @staticmethod
    def now() -> "Clock":
        own = os.times()
        used = own.user + own.system + own.children_user + own.children_system
        try:
            line = Path("/proc/stat").read_text().splitlines()[0]
        except OSError:
            return Clock(0.0, 0.0, used)
        ticks = [int(field) for field in line.split()[1:9]]  # user … idle, iowait … steal
        second = os.sysconf("SC_CLK_TCK")
        return Clock(sum(ticks) / second, (ticks[3] + ticks[4]) / second, used)

    def others_since(self, before: "Clock") -> float | None:
        """The share of the machine that others took, the host included; None where unknown."""
        whole = self.all - before.all
        if whole <= 0.0:
            return None
        taken = whole - (self.idle - before.idle) - (self.own - before.own)
        return max(0.0, taken / whole)


@dataclass(frozen=True)
class Samples:
    """What all contestants showed, and the share of the machine that others took, by round."""

    series: dict[str, Series]
    others: list[float | None]


@dataclass(frozen=True)
class Budget:
    """How long a case may take, whatever it holds; the fewest rounds come first."""

    seconds: float
    fewest: int
    most: int
    # How long a case may wait, in all, for rounds that begin on a quiet machine.
    patience: float = 0.0


Inspect = Callable[[dict[str, Any]], None]


def interleave(
    contestants: list[Contestant], budget: Budget, inspect: Inspect | None = None
) -> Samples:
    """Samples of all. `inspect` sees what each returned in the first round, before the second."""
    series = {x.name: Series(x.name, x.unit) for x in contestants}
    others = []
    start, waited = time.perf_counter(), 0.0
    for number in range(budget.most):
        if number >= budget.fewest and time.perf_counter() - start - waited > budget.seconds:
            break
        waited += wait_for_quiet(budget.patience - waited)
        before = Clock.now()
        results = {}
        for contestant in contestants if number % 2 == 0 else contestants[::-1]:
            own = series[contestant.name]
            if contestant.rounds is not None and number >= contestant.rounds:
                continue
            time.sleep(PAUSE)
            samples = []
            for _ in range(calls_of(own)):
                seconds, result = contestant.measure()
                own.shortest = min(own.shortest, seconds)
                samples.append(seconds if own.unit is Unit.SECONDS else result)
                if number == 0:
                    results[contestant.name] = result
                del result
            own.rounds.append(samples)
        others.append(Clock.now().others_since(before))
        if number == 0 and inspect:
            inspect(results)
    return Samples(series, others)


def wait_for_quiet(patience: float) -> float:
    """Waits until others leave the machine alone, at most so long; returns how long it was."""
    start = time.perf_counter()
    while (waited := time.perf_counter() - start) < patience:
        before = Clock.now()
        time.sleep(QUIET_SECONDS)
        if (Clock.now().others_since(before) or 0.0) < QUIET_SHARE:
            break
    return waited


def calls_of(series: Series) -> int:
    """How many calls make a turn: one in the first round, then by how long it took."""
    return max(1, min(TURN_CALLS, int(TURN_SECONDS / series.shortest)))
