"""Divergence against density, one line per method, from results of `quality.py`.

    plot.py OUT.svg TITLE RESULT.json...
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402


def main() -> None:
    out, title, *results = sys.argv[1:]
    lines: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    floor = None
    for path in results:
        with open(path) as source:
            for name, found in json.load(source)["methods"].items():
                if name == "sdpa":
                    floor = found["kl"]
                else:
                    lines[name.rsplit(" ", 1)[0]].append((found["density"], found["kl"]))
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, points in sorted(lines.items()):
        label = "best possible (exact masses)" if name == "exact" else name
        axes.plot(*zip(*sorted(points)), marker="o", label=label, linestyle="--" if name == "exact" else "-")
    if floor is not None:
        axes.axhline(floor, color="gray", linewidth=0.8, label="rounding alone (torch's dense attention)")
    axes.set(xlabel="share of the causal blocks", ylabel="KL divergence to dense, nats", yscale="log", title=title)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
