"""The picture: rates beside the peak, and time by sparsity, one column per head dim."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from figures import Case
from sections import AMX_PEAK, COMPILED_MASK, LAYOUT, LONGSPAN, MASK, PEAK, SDPA, SPARSITIES

FLEX = "FlexAttention"
BARS = ("forward, dense", "backward, dense", "forward, causal", "backward, causal")

# Colours that stay apart for colour-blind readers and in grey.
OURS, THEIRS, OTHER = "#0b5fa5", "#e08a1e", "#8c8c8c"


def draw(cases: list[Case], dtype: str, threads: int, stem: Path) -> Path | None:
    """Writes `stem`.png and .svg, if there is anything to show: the largest token count of each
    half. Returns the former."""
    halves = [
        (half, show)
        for half, show in (
            ([case for case in cases if case.what in BARS], rates),
            ([case for case in cases if "sparse window" in case.what], by_sparsity),
        )
        if half
    ]
    if not halves:
        return None
    dims = sorted({case.dim for half, _ in halves for case in half})
    size = (5.6 * len(dims), 3.9 * len(halves))
    figure, axes = plt.subplots(len(halves), len(dims), figsize=size, squeeze=False)
    for row, (half, show) in zip(axes, halves, strict=True):
        tokens = max(case.tokens for case in half)
        for axis, dim in zip(row, dims, strict=True):
            chosen = [case for case in half if case.dim == dim and case.tokens == tokens]
            shape = f"{tokens:,} tokens, 8 heads, d {dim}"
            axis.set_title(f"{dtype}, {shape}, {threads} threads", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
            show(axis, chosen)
    figure.tight_layout()
    for suffix in ("png", "svg"):
        # No date within: the same numbers give the same file.
        about = {"Date": None} if suffix == "svg" else {}
        figure.savefig(stem.with_suffix(f".{suffix}"), dpi=150, metadata=about)
    plt.close(figure)
    return stem.with_suffix(".png")


def rates(axis: Axes, cases: list[Case]) -> None:
    cases = sorted(cases, key=lambda case: BARS.index(case.what))
    places = range(len(cases))
    for shift, name, colour in ((-0.2, SDPA, THEIRS), (0.2, LONGSPAN, OURS)):
        values = [case.rate(name) or 0.0 for case in cases]
        bars = axis.bar([x + shift for x in places], values, 0.38, label=name, color=colour)
        axis.bar_label(bars, fmt="%.0f", fontsize=8)
    limit = AMX_PEAK if all(AMX_PEAK in case.samples.series for case in cases) else PEAK
    peaks = [case.rate(limit) or 0.0 for case in cases]
    ends = [x - 0.42 for x in places], [x + 0.42 for x in places]
    axis.hlines(peaks, *ends, color="black", lw=1.2, label=f"{limit}, same rounds")
    axis.set_xticks(list(places), [case.what.replace(", ", ",\n") for case in cases], fontsize=8)
    axis.set_ylabel("GFLOP/s on active pairs")
    axis.set_ylim(0, 1.25 * max(peaks + [case.rate(LONGSPAN) or 0.0 for case in cases]))
    axis.legend(fontsize=8, ncols=3, loc="upper center", frameon=False)


def by_sparsity(axis: Axes, cases: list[Case]) -> None:
    def milliseconds(case: Case, parts: tuple[str, ...]) -> float:
        """The sum of the best of each part, of FlexAttention at its better block size."""
        best = {name: series.best for name, series in case.samples.series.items()}
        flex = min(value for name, value in best.items() if name.startswith(FLEX))
        return 1e3 * sum(flex if part == FLEX else best[part] for part in parts)

    lines = (
        (f"{FLEX} + {MASK}", OTHER, "s:", (FLEX, MASK)),
        (f"{FLEX} + the same, compiled", THEIRS, "s--", (FLEX, COMPILED_MASK)),
        (FLEX, THEIRS, "s-", (FLEX,)),
        ("Longspan, layout build included", OURS, "o-", (LONGSPAN, LAYOUT)),
    )
    cases = sorted(cases, key=lambda case: case.what)
    places = range(len(cases))
    for label, colour, style, parts in lines:
        values = [milliseconds(case, parts) for case in cases]
        axis.plot(places, values, style, color=colour, label=label, ms=5)
        if style in ("s-", "o-"):
            for place, value in zip(places, values, strict=True):
                text = f"{value:.1f}" if value < 10 else f"{value:.0f}"
                axis.annotate(
                    text,
                    xy=(place, value),
                    xytext=(0, -12),  # below
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )
    names = [case.what.removeprefix("forward, ").removesuffix(" window") for case in cases]
    axis.set_xticks(list(places), names, fontsize=8)
    axis.set_xlim(-0.3, len(SPARSITIES) - 0.7)
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.set_ylim(low / 1.6, high * 6)
    axis.set_ylabel("forward, ms (log)")
    axis.grid(axis="y", which="major", alpha=0.3)
    axis.legend(fontsize=8, ncols=2, loc="upper center", frameon=False)
