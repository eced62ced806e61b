"""What a choice of key blocks costs a pretrained model: KL divergence of its logits to the dense model's, and loss.

    quality.py MODEL_DIR GGUF_FILE f32|bf16 TOKENS SEQUENCES DENSITIES METHODS OUT.json TEXT...

METHODS are some of mass, block_mass (of `clusters`), antidiagonals, window, exact and sdpa, with commas. Every text gives
SEQUENCES sequences, read at once. Methods have one threshold each, the same for all layers and heads, at which their mean
density of causal blocks in the dense model is a given one: over the first sequence of each text, one threshold for all
texts; or, where sequences are longer than 8,192 tokens, one per sequence. Scored are all positions behind the first
eighth. `exact` chooses by exact masses, the best that any estimate can do, on the first sequence of each text alone;
`sdpa` is torch's dense attention, on the first sequence of all, and tells what rounding alone costs. Intervals are 95 %,
of ratios of means over the same resampled stretches of 64 tokens.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy
import torch
from models import load, sequences
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import longspan
import longspan.torch

BLOCK = 64
ALWAYS = "window(64, 0) | sinks(1)"
STRETCH = 64
# Thresholds by which a density is looked for: logits of a mass, logarithms of a share.
GRIDS = {"mass": [-2 + 1.5 * step for step in range(6)], "block_mass": [-8.5 + step for step in range(6)]}


class Method(NamedTuple):
    """How blocks are chosen: `kind` is `estimator`, `exact`, `pattern` or `sdpa`."""

    kind: str
    what: str = ""
    by: str = "mass"
    at: float = 0.0

    @property
    def threshold(self) -> float:
        return 1 / (1 + math.exp(-self.at)) if self.by == "mass" else math.exp(self.at)

    def selector(self) -> longspan.BlockSelector:
        mass = {"mass": 1.0, self.by: self.threshold}
        return longspan.BlockSelector("causal", always=ALWAYS, estimator=self.what, **mass)


def exact_masses(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The mean share of each causal block in the softmax of a row of blocks, `[heads, rows, columns]`."""
    heads, tokens, _ = q.shape
    blocks = tokens // BLOCK
    masses = torch.zeros(heads, blocks, blocks)
    later = torch.ones(BLOCK, BLOCK).triu(1).bool()
    for head in range(heads):
        keys = k[head // (heads // k.shape[0])].float().mT.contiguous()
        queries = q[head].float() * scale
        # One row of blocks at a time stays in the cache.
        for row in range(blocks):
            end = (row + 1) * BLOCK
            scores = queries[end - BLOCK : end] @ keys[:, :end]
            scores[:, end - BLOCK :].masked_fill_(later, -math.inf)
            masses[head, row, : row + 1] = scores.softmax(-1).mean(0).unflatten(0, (-1, BLOCK)).sum(-1)
    return masses


def exact_choice(masses: Tensor, mass: float) -> Tensor:
    """The smallest sets of blocks that hold `mass`, with those that are always kept."""
    blocks = masses.shape[-1]
    order = masses.argsort(dim=-1, descending=True, stable=True)
    sums = masses.gather(-1, order).cumsum(-1)
    before = torch.cat([torch.zeros_like(sums[..., :1]), sums[..., :-1]], -1)
    kept = torch.zeros_like(masses, dtype=torch.bool).scatter(-1, order, before < mass)
    near = torch.ones(blocks, blocks).tril().triu(-1).bool()
    near[:, 0] = True
    return (kept | near) & torch.ones(blocks, blocks).tril().bool()


DENSE = Method("pattern", "causal")


class Attention:
    """What layers call: attention by a method, whose blocks are counted and whose time is taken."""

    def __init__(self) -> None:
        self.begin(DENSE)
        self.calibrated: dict[tuple[str, str, str], list[list[float]]] | None = None

    def begin(self, method: Method) -> None:
        self.method = method
        self.densities: list[float] = []
        self.seconds = 0.0

    def __call__(self, module, q: Tensor, k: Tensor, v: Tensor, mask, scaling=None, **_) -> tuple[Tensor, None]:
        if self.calibrated is not None:
            self.calibrate(q, k, scaling)
        start = time.perf_counter()
        if self.method.kind == "sdpa":
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        else:
            pattern, density = self.choose(q, k, scaling)
            self.densities.append(density)
            out = longspan.torch.attention(q, k, v, pattern, scale=scaling, enable_gqa=True)
        self.seconds += time.perf_counter() - start
        return out.transpose(1, 2), None

    def choose(self, q: Tensor, k: Tensor, scale: float):
        tokens = q.shape[2]
        every = longspan.causal().compile(tokens).active_blocks
        if self.method.kind == "pattern":
            layout = longspan.Pattern(self.method.what).compile(tokens)
            return layout, layout.active_blocks / every
        if self.method.kind == "estimator":
            selection = self.method.selector().select(q, k, scale=scale)
            return selection.layout, selection.density
        kept = exact_choice(exact_masses(q[0], k[0], scale), self.method.threshold)
        counts = kept.sum(-1, dtype=torch.int32)[None].numpy()
        indices = kept.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[None].numpy()
        selection = longspan.ListedBlocks("causal", counts, indices).select(q, k, scale=scale, block=BLOCK)
        return selection.layout, selection.density

    def calibrate(self, q: Tensor, k: Tensor, scale: float) -> None:
        for (kind, what, by), found in self.calibrated.items():
            grid = [Method(kind, what, by, at) for at in GRIDS[by]]
            if kind == "exact":
                masses = exact_masses(q[0], k[0], scale)
                kept = [exact_choice(masses, method.threshold).sum().item() for method in grid]
                every = masses.shape[0] * masses.shape[1] * (masses.shape[1] + 1) / 2
                found.append([blocks / every for blocks in kept])
            else:
                found.append([method.selector().select(q, k, scale=scale).density for method in grid])


class Model:
    def __init__(self, folder: str, file: str, dtype: torch.dtype) -> None:
        self.attention = Attention()
        self.model, self.tokenizer = load(folder, file, dtype, self.attention)

    def hidden(self, ids: Tensor, method: Method) -> Tensor:
        """The last hidden states of what is scored, and the position before it."""
        self.attention.begin(method)
        return self.model.model(ids).last_hidden_state[0, ids.shape[1] // 8 - 1 : -1]

    def log_probabilities(self, hidden: Tensor) -> Iterator[Tensor]:
        for part in hidden.split(512):
            yield self.model.lm_head(part).float().log_softmax(-1)

    def compare(self, dense: Tensor, others: list[Tensor], target: Tensor) -> list[Tensor]:
        """Per position: divergence, loss of the dense model, and its change, `[3, positions]` each."""
        found: list[list[Tensor]] = [[] for _ in others]
        each = zip(*(self.log_probabilities(hidden) for hidden in (dense, *others)))
        for (ours, *rest), words in zip(each, target.split(512)):
            for theirs, parts in zip(rest, found):
                divergence = (ours.exp() * (ours - theirs)).sum(-1)
                losses = [-x.gather(1, words[:, None])[:, 0] for x in (ours, theirs)]
                parts.append(torch.stack([divergence, losses[0], losses[1] - losses[0]]))
        return [torch.cat(parts, 1) for parts in found]


def window(tokens: int, density: float) -> str:
    """The widest window with a sink that has at most this density, or the narrowest."""
    every = longspan.causal().compile(tokens).active_blocks
    fitting = ""
    for width in range(BLOCK, tokens, BLOCK):
        pattern = f"causal & (window({width}, 0) | sinks(1))"
        if fitting and longspan.Pattern(pattern).compile(tokens).active_blocks > density * every:
            return fitting
        fitting = pattern
    return fitting


def at_density(densities: list[float], grid: list[float], density: float) -> float:
    """Where a curve of densities reaches one, by interpolation of their logarithms."""
    pairs = sorted(zip(numpy.log(densities), grid))
    return float(numpy.interp(math.log(density), [pair[0] for pair in pairs], [pair[1] for pair in pairs]))


def ratio_interval(ours: Tensor, theirs: Tensor) -> tuple[float, float, float]:
    """The ratio of two means over the same positions, with its interval."""
    both = [x[: len(x) // STRETCH * STRETCH].unflatten(0, (-1, STRETCH)).mean(1) for x in (ours, theirs)]
    picks = torch.randint(len(both[0]), (4000, len(both[0])), generator=torch.Generator().manual_seed(1))
    ratios = both[0][picks].mean(1) / both[1][picks].mean(1)
    return (ours.mean() / theirs.mean()).item(), ratios.quantile(0.025).item(), ratios.quantile(0.975).item()


class Result:
    """What a method did to the sequences that it read."""

    def __init__(self) -> None:
        self.methods: list[Method] = []
        self.densities: list[float] = []
        self.seconds: list[float] = []
        self.attention_seconds: list[float] = []
        self.compared: list[Tensor] = []
        self.first: list[Tensor] = []

    def column(self, index: int, first: bool = False) -> Tensor:
        """Divergence, loss or change of loss of all positions, or of those of first sequences."""
        values = torch.cat(self.compared, 1)[index]
        return values[torch.cat(self.first)] if first else values

    def summary(self) -> dict[str, float | int]:
        mean = lambda values: sum(values) / len(values)
        return {
            "density": mean(self.densities),
            "kl": self.column(0).mean().item(),
            "loss": self.column(1).mean().item(),
            "change": self.column(2).mean().item(),
            "scored": self.column(0).numel(),
            "seconds": mean(self.seconds),
            "attention_seconds": mean(self.attention_seconds),
        }


#: Methods with a threshold: kind, estimator, and what the threshold is of.
KEYS = {
    "mass": ("estimator", "clusters", "mass"),
    "block_mass": ("estimator", "clusters", "block_mass"),
    "antidiagonals": ("estimator", "antidiagonals", "mass"),
    "exact": ("exact", "", "mass"),
}


def tuned(
    model: Model, sequences: list[Tensor], densities: list[float], wanted: list[str]
) -> tuple[dict[str, Method], Tensor]:
    """Every method at the thresholds of the densities, and the dense model's last hidden states of the last sequence."""
    tokens = sequences[0].shape[1]
    keys = [KEYS[name] for name in wanted if name in KEYS]
    curves: dict[tuple[str, str, str], list[list[float]]] = {key: [] for key in keys}
    model.attention.calibrated = curves
    for number, ids in enumerate(sequences):
        dense = model.hidden(ids, DENSE)
        print(f"calibrated with {number + 1} of {len(sequences)} sequences", file=sys.stderr, flush=True)
    model.attention.calibrated = None
    methods = {"sdpa": Method("sdpa")} if "sdpa" in wanted else {}
    for density in densities:
        for kind, what, by in keys:
            curve = torch.tensor(curves[kind, what, by]).mean(0).tolist()
            name = what or kind if by == "mass" else f"{what} by {by}"
            methods[f"{name} {density}"] = Method(kind, what, by, at_density(curve, GRIDS[by], density))
        if "window" in wanted:
            methods[f"window {density}"] = Method("pattern", window(tokens, density))
    return methods, dense


def measured(
    model: Model, densities: list[float], wanted: list[str], parts: list[tuple[str, bool, Tensor]]
) -> Iterator[dict[str, Result]]:
    """Every method on every sequence, beside the dense model; all results so far after each sequence."""
    results: dict[str, Result] = {}
    each = parts[0][2].shape[1] > 8192
    if not each:
        methods, _ = tuned(model, [ids for _, first, ids in parts if first], densities, wanted)
    for number, (text, first, ids) in enumerate(parts):
        if each:
            methods, dense = tuned(model, [ids], densities, wanted)
        else:
            dense = model.hidden(ids, DENSE)
        skipped = {"exact": not first, "sdpa": number > 0}
        chosen = {name: method for name, method in methods.items() if not skipped.get(method.kind)}
        hidden = []
        for name, method in chosen.items():
            began = time.perf_counter()
            hidden.append(model.hidden(ids, method))
            own = results.setdefault(name, Result())
            own.methods.append(method)
            own.seconds.append(time.perf_counter() - began)
            own.attention_seconds.append(model.attention.seconds)
            own.densities.append(sum(model.attention.densities) / max(len(model.attention.densities), 1))
        compared = model.compare(dense, hidden, ids[0, ids.shape[1] // 8 :])
        for name, values in zip(chosen, compared):
            own = results[name]
            own.compared.append(values)
            own.first.append(torch.tensor(first).expand(values.shape[1]))
            divergence, loss, change = own.compared[-1].mean(1).tolist()
            print(
                f"{text}: {name}: density {own.densities[-1]:.4f}, KL {divergence:.5f}, loss {loss:.4f} {change:+.4f}, "
                f"{own.seconds[-1]:.1f} s, attention {own.attention_seconds[-1]:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        yield results


def ratios(results: dict[str, Result], densities: list[float]) -> Iterator[dict[str, float | str]]:
    """Divergences of clusters beside those of others."""
    for density in densities:
        for ours in ("clusters", "clusters by block_mass"):
            for theirs in ("antidiagonals", "window", "exact"):
                if not {f"{ours} {density}", f"{theirs} {density}"} <= results.keys():
                    continue
                own, other = (results[f"{name} {density}"] for name in (ours, theirs))
                ratio, low, high = ratio_interval(own.column(0, theirs == "exact"), other.column(0))
                yield {"density": density, "ours": ours, "theirs": theirs, "ratio": ratio, "low": low, "high": high}


def main() -> None:
    folder, file, dtype, length, count, shares, names, out, *texts = sys.argv[1:]
    tokens, densities = int(length), [float(density) for density in shares.split(",")]
    if tokens % BLOCK:
        raise SystemExit(f"{tokens} tokens, expected a multiple of {BLOCK}")
    model = Model(folder, file, {"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    parts = []
    for text in texts:
        for number, ids in enumerate(sequences(model.tokenizer, text, tokens, int(count))):
            parts.append((text.rsplit("/", 1)[-1], number == 0, ids))
    about = {"model": file, "dtype": dtype, "tokens": tokens, "sequences": len(parts)}
    for results in measured(model, densities, names.split(","), parts):
        found = {
            **about,
            "methods": {
                name: {**own.methods[0]._asdict(), "thresholds": [x.threshold for x in own.methods], **own.summary()}
                for name, own in results.items()
            },
            "ratios": list(ratios(results, densities)),
        }
        with open(out, "w") as target:
            json.dump(found, target, indent=1)
    print("| method | density | KL to dense | change of loss |")
    print("|---|---|---|---|")
    for name, own in found["methods"].items():
        print(f"| {name} | {own['density']:.4f} | {own['kl']:.5f} | {own['change']:+.4f} |")
    for row in found["ratios"]:
        low, high = row["low"], row["high"]
        print(f"{row['density']}: KL of {row['ours']} : {row['theirs']} {row['ratio']:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
