#!/usr/bin/env python3
"""The tables and the plot of a run of smollm2.py.

    python examples/smollm2/report.py DIRECTORY

Reads DIRECTORY/results.json, of a run that has ended or of the parts that it has done; writes results.md and
smollm2.svg beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib  # type: ignore[import-not-found, unused-ignore]

matplotlib.use("Agg")
from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

#: A record of results.json: `Prefill`, `Step` or `FineTuning` of smollm2.py.
Row: TypeAlias = dict[str, Any]

SDPA, DENSE = "sdpa", "longspan"
LABELS = {
    SDPA: "SDPA",
    DENSE: "Longspan, dense",
    "longspan_window": "Longspan, window",
    "longspan_selector": "Longspan, selector",
}


def markdown(results: dict[str, Any]) -> str:
    prefill, steps = results["prefill"], results["steps"]
    parts = [", ".join(f"{name} {value}" for name, value in results["about"].items())]
    if prefill:
        parts += [speed_table(prefill), quality_table(prefill), *agreement(prefill)]
    if steps:
        parts.append(step_table(steps))
    for what, rows in (("prefill", prefill), ("a fine-tuning step", steps)):
        parts += [bound(what, row) for row in rows if row["attention"] == SDPA]
    if results["fine_tuning"] is not None:
        parts.append(fine_tuning_table(results["fine_tuning"]))
    return "\n\n".join(parts) + "\n"


def speed_table(rows: list[Row]) -> str:
    heads = ["dtype", "attention", "blocks", "prefill, tokens per second", "× SDPA", "in attention"]
    lines = [
        (
            row["dtype"],
            LABELS[row["attention"]],
            percent(row["blocks"]),
            f"{row['tokens'] / row['seconds']:,.0f}",
            f"{beside_sdpa(row, rows):.2f}",
            percent(row["attention_seconds"] / row["seconds"]),
            f"{row['decode_tokens_per_second']:.1f}",
            gibibytes(row["peak_bytes"]),
        )
        for row in rows
    ]
    return table([*heads, "generation, tokens per second", "peak memory"], lines)


def quality_table(rows: list[Row]) -> str:
    heads = ["dtype", "attention", "loss", "KL to dense", "largest logit difference", "RMS difference", "equal tokens"]
    lines = [
        (
            row["dtype"],
            LABELS[row["attention"]],
            f"{row['loss']:.4f}",
            # Rounding may leave a divergence below 0.
            f"{max(row['kl'], 0.0):.5f}",
            f"{row['largest_difference']:.2g}",
            f"{row['rms_difference']:.3g}",
            str(row["equal_tokens"]),
        )
        for row in rows
    ]
    return table(heads, lines)


def step_table(rows: list[Row]) -> str:
    heads = ["dtype", "attention", "fine-tuning step, seconds", "× SDPA", "in attention", "peak memory"]
    lines = [
        (
            row["dtype"],
            LABELS[row["attention"]],
            f"{row['seconds']:.2f}",
            f"{beside_sdpa(row, rows):.2f}",
            percent(row["attention_seconds"] / row["seconds"]),
            gibibytes(row["peak_bytes"]),
        )
        for row in rows
    ]
    return table(heads, lines)


def fine_tuning_table(found: Row) -> str:
    steps = len(found["losses"])
    heads = ["validation loss with", "before", f"after {steps} steps with the window", "change"]
    pairs = [(LABELS[name], loss, found["after"][name]) for name, loss in found["before"].items()]
    lines = [(label, f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}") for label, before, after in pairs]
    trained = f"{steps} steps of {found['tokens']:,} tokens, {found['seconds'] / steps:.2f} s each"
    return f"{trained}; {found['validation_tokens']:,} tokens of validation.\n\n{table(heads, lines)}"


def agreement(rows: list[Row]) -> list[str]:
    """What rounding does to dense logits, beside SDPA."""
    lines: list[str] = []
    for row in rows:
        if row["attention"] != DENSE:
            continue
        if row["rms_beside_sdpa"] is None:
            lines.append(f"f32: dense logits differ from SDPA's by {row['largest_difference']:.1e} at most.")
        else:
            ratio, low, high = row["rms_beside_sdpa"]
            lines.append(
                f"{row['dtype']}: dense logits are {ratio:.3f} times as far from SDPA's f32 logits as SDPA's "
                f"{row['dtype']} logits are (RMS; 95 % interval {low:.3f} to {high:.3f})."
            )
    return lines


def bound(what: str, row: Row) -> str:
    share = row["attention_seconds"] / row["seconds"]
    return (
        f"{row['dtype']}: attention is {percent(share)} of the time of {what} with SDPA; attention that takes no time "
        f"would make it {1 / (1 - share):.2f} × as fast."
    )


def beside_sdpa(row: Row, rows: list[Row]) -> float:
    """How many times as fast as SDPA in the same dtype."""
    sdpa = next(other for other in rows if other["attention"] == SDPA and other["dtype"] == row["dtype"])
    return float(sdpa["seconds"] / row["seconds"])


def table(heads: list[str], lines: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines))


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def gibibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f} GiB"


def plot(results: dict[str, Any], path: Path) -> None:
    """Seconds of a prefill and of a step, in attention and elsewhere; losses over the steps."""
    panels: list[tuple[Any, Any, str]] = []
    if results["prefill"]:
        panels.append((bars, results["prefill"], "prefill"))
    if results["steps"]:
        panels.append((bars, results["steps"], "fine-tuning step"))
    if results["fine_tuning"] is not None:
        panels.append((losses, results["fine_tuning"], "fine-tuning with the window"))
    made: Any = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4.2), layout="constrained", squeeze=False)
    figure, axes = made
    for index, (draw, found, title) in enumerate(panels):
        draw(axes[0, index], found, title)
    figure.savefig(path)


def bars(axis: Any, rows: list[Row], title: str) -> None:
    names = [f"{LABELS[row['attention']]}, {row['dtype']}" for row in rows]
    inside = [row["attention_seconds"] for row in rows]
    rest = [row["seconds"] - row["attention_seconds"] for row in rows]
    axis.barh(names, inside, color="C0", label="attention")
    axis.barh(names, rest, left=inside, color="C7", label="everything else")
    axis.invert_yaxis()
    axis.set(xlabel="seconds", title=f"{title}, {rows[0]['tokens']:,} tokens")
    axis.legend(loc="lower right")


def losses(axis: Any, found: Row, title: str) -> None:
    steps = len(found["losses"])
    axis.plot(range(steps), found["losses"], color="C0", alpha=0.4, label="training")
    for index, (name, before) in enumerate(found["before"].items()):
        label = f"validation, {LABELS[name]}"
        axis.plot((0, steps), (before, found["after"][name]), "o--", color=f"C{index + 1}", label=label)
    axis.set(xlabel=f"steps of {found['tokens']:,} tokens", ylabel="loss, nats per token", title=title)
    axis.grid(alpha=0.3)
    axis.legend()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1])
    results = json.loads((directory / "results.json").read_text())
    (directory / "results.md").write_text(markdown(results))
    plot(results, directory / "smollm2.svg")


if __name__ == "__main__":
    main()
