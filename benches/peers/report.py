"""Results as Markdown and as JSON."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from longspan import limits

from environment import output
from figures import Case, Figure
from measure import Unit
from sections import Bench

HOW = """\
All engines ran in one process, in the same rounds, in alternating order, {threads} threads each, \
{dtype}, batch 1, on the same tensors; before each turn is a pause in which the last engine's threads \
fall asleep. Figures compare the best of all rounds; the column beside it compares medians. \
GFLOP/s count active pairs only: 4 · d a pair forward, 10 · d backward. Every line that has a \
rival was checked for agreement in its first round. What this doesn't say: \
[benches/peers](../peers/README.md)."""


@dataclass(frozen=True)
class Machine:
    """Where and with what it ran."""

    date: str
    cpu: str
    cores: int
    system: str
    python: str
    torch: str
    rustc: str
    longspan: str
    isa: str
    dtype: str
    threads: int
    # The share of the machine that others took: mean and worst of all rounds.
    others: tuple[float, float] | None

    def lines(self) -> list[str]:
        others = "not known"
        if self.others:
            mean, worst = (f"{100 * share:.0f} %" for share in self.others)
            others = f"{mean} on average, {worst} in the worst round"
        return [
            f"- CPU: {self.cpu}, {self.cores} cores, {self.system}",
            f"- What others took of it, the host included: {others}",
            f"- Longspan {self.longspan}, {self.dtype}, {self.isa}, {self.rustc}",
            f"- torch {self.torch}, Python {self.python}",
        ]


def machine(bench: Bench, commit: str) -> Machine:
    isa = bench.settings.isa or limits.best_isa()
    others = [x for case in bench.cases for x in case.samples.others if x is not None]
    return Machine(
        date=date.today().isoformat(),
        cpu=cpu_model(),
        cores=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        rustc=output("rustc", "--version").split(" (")[0],
        longspan=commit,
        isa=isa,
        dtype=bench.settings.dtype,
        threads=bench.settings.threads,
        others=(statistics.mean(others), max(others)) if others else None,
    )


def cpu_model() -> str:
    """The name that Linux knows, with the model's number where the name says little."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    except OSError:
        pass
    name = fields.get("model name") or platform.processor() or platform.machine()
    family, model = fields.get("cpu family"), fields.get("model")
    return f"{name} (family {family}, model {model})" if model else name


def markdown(bench: Bench, where: Machine, command: str, picture: Path | None) -> str:
    judged = [figure for figure in bench.figures if figure.target]
    met = sum(figure.verdict == "met" for figure in judged)
    parts = [
        f"# Longspan and its peers, {where.dtype}, {where.date}",
        f"`{command}`",
        "\n".join(where.lines()),
        HOW.format(threads=where.threads, dtype=where.dtype),
        f"{met} of {len(judged)} targets met.",
        *(
            [f"![GFLOP/s of Longspan and torch, and time by sparsity]({picture.name})"]
            if picture
            else []
        ),
        "## Figures",
        figure_table(bench.figures),
        "## Times",
        time_table(bench.cases),
    ]
    return "\n\n".join(parts) + "\n"


def figure_table(figures: list[Figure]) -> str:
    rows = [
        (
            figure.what,
            f"{figure.tokens:,}",
            str(figure.dim),
            figure.kind.show(figure.best),
            figure.kind.show(figure.median),
            figure.target.show() if figure.target else "",
            f"**{figure.verdict}**" if figure.verdict == "missed" else figure.verdict,
        )
        for figure in figures
    ]
    return table(("figure", "tokens", "d", "best", "median", "target", ""), "lrrrrrl", rows)


def time_table(cases: list[Case]) -> str:
    rows = []
    for case in cases:
        for series in case.samples.series.values():
            timed = series.unit is Unit.SECONDS
            rate = case.rate(series.name)
            rows.append(
                (
                    case.what,
                    f"{case.tokens:,}",
                    str(case.dim),
                    str(case.heads),
                    series.name,
                    milliseconds(series.best) if timed else "",
                    milliseconds(series.median) if timed else "",
                    ""
                    if rate is None
                    else f"{rate:.0f} {'' if timed else series.unit.value}".strip(),
                    str(len(series.rounds)),
                )
            )
    names = ("case", "tokens", "d", "heads", "", "best, ms", "median, ms", "GFLOP/s", "rounds")
    return table(names, "lrrrlrrrr", rows)


def milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def table(names: tuple[str, ...], aligned: str, rows: Sequence[tuple[str, ...]]) -> str:
    rule = ["---:" if side == "r" else "---" for side in aligned]
    # A bar within a pattern would end its cell.
    lines = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [list(names), rule, *lines])


def raw(bench: Bench, where: Machine, command: str) -> str:
    cases = [
        {
            "what": case.what,
            "tokens": case.tokens,
            "dim": case.dim,
            "heads": case.heads,
            **case.notes,
            "flops": case.flops,
            "others": case.samples.others,
            "samples": {
                series.name: {"unit": series.unit.value, "rounds": series.rounds}
                for series in case.samples.series.values()
            },
        }
        for case in bench.cases
    ]
    figures = [
        {
            "what": figure.what,
            "tokens": figure.tokens,
            "dim": figure.dim,
            "best": figure.best,
            "median": figure.median,
            "target": figure.target.show() if figure.target else None,
            "verdict": figure.verdict,
        }
        for figure in bench.figures
    ]
    whole = {"machine": asdict(where), "command": command, "figures": figures, "cases": cases}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
