"""What a choice of key blocks costs a pretrained model: KL divergence of its logits to the dense model's, and loss.

    quality.py MODEL_DIR GGUF_FILE f32|bf16 TOKENS SEQUENCES DENSITIES OUT.json TEXT...

Every text gives SEQUENCES sequences, read at once. Methods have one threshold each, the same for all layers, heads and
texts, at which their mean density of causal blocks in the dense model is a given one (over the first sequence of each
text). Scored are all positions behind the first quarter. `exact` chooses by exact masses, on the first sequence of each
text alone: the best that any estimate can do. Intervals are 95 %, of ratios of means over the same resampled stretches
of 64 tokens.
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
GRIDS = {"mass": [-3 + 0.75 * step for step in range(13)], "block_mass": [-9.5 + 0.5 * step for step in range(15)]}


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
    for head in range(heads):
        keys = k[head // (heads // k.shape[0])].float()
        for first in range(0, tokens, 512):
            end = min(first + 512, tokens)
            scores = q[head, first:end].float() @ keys[:end].mT * scale
            scores[:, first:].masked_fill_(torch.ones(end - first, end - first).triu(1).bool(), -math.inf)
            shares = scores.softmax(-1).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).mean(1).sum(-1)
            masses[head, first // BLOCK : end // BLOCK, : end // BLOCK] = shares
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


class Attention:
    """What layers call: attention by a method, whose blocks are counted and whose time is taken."""

    def __init__(self) -> None:
        self.method = Method("pattern", "causal")
        self.calibrated: dict[tuple[str, str, str], list[list[float]]] | None = None

    def begin(self, method: Method) -> None:
        self.method, self.densities, self.seconds = method, [], 0.0

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
        return self.model.model(ids).last_hidden_state[0, ids.shape[1] // 4 - 1 : -1]

    def log_probabilities(self, hidden: Tensor) -> Iterator[Tensor]:
        for part in hidden.split(512):
            yield self.model.lm_head(part).float().log_softmax(-1)

    def compare(self, dense: Tensor, other: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Per position: divergence, loss of the dense model, and its change."""
        found = []
        for ours, theirs, words in zip(self.log_probabilities(dense), self.log_probabilities(other), target.split(512)):
            divergence = (ours.exp() * (ours - theirs)).sum(-1)
            losses = [-x.gather(1, words[:, None])[:, 0] for x in (ours, theirs)]
            found.append(torch.stack([divergence, losses[0], losses[1] - losses[0]]))
        return tuple(torch.cat(found, 1))


def window(tokens: int, density: float) -> str:
    """The widest window with a sink that has at most this density."""
    every = longspan.causal().compile(tokens).active_blocks
    fitting = ""
    for width in range(BLOCK, tokens, BLOCK):
        pattern = f"causal & (window({width}, 0) | sinks(1))"
        if longspan.Pattern(pattern).compile(tokens).active_blocks > density * every:
            return fitting
        fitting = pattern
    return fitting


def at_density(densities: list[float], grid: list[float], density: float) -> float:
    """Where a curve of densities reaches one, by interpolation."""
    pairs = sorted(zip(densities, grid))
    return float(numpy.interp(density, [pair[0] for pair in pairs], [pair[1] for pair in pairs]))


def ratio_interval(ours: Tensor, theirs: Tensor) -> tuple[float, float, float]:
    """The ratio of two means over the same positions, with its interval."""
    both = [x[: len(x) // STRETCH * STRETCH].unflatten(0, (-1, STRETCH)).mean(1) for x in (ours, theirs)]
    picks = torch.randint(len(both[0]), (4000, len(both[0])), generator=torch.Generator().manual_seed(1))
    ratios = both[0][picks].mean(1) / both[1][picks].mean(1)
    return (ours.mean() / theirs.mean()).item(), ratios.quantile(0.025).item(), ratios.quantile(0.975).item()


def main() -> None:
    folder, file, dtype, tokens, count, densities, out, *texts = sys.argv[1:]
    tokens, densities = int(tokens), [float(density) for density in densities.split(",")]
    model = Model(folder, file, {"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    with_exact = tokens <= 8192
    chosen = [("estimator", "clusters", "mass"), ("estimator", "clusters", "block_mass"), ("estimator", "antidiagonals", "mass")]
    if with_exact:
        chosen.append(("exact", "", "mass"))
    parts = [(text, ids) for text in texts for ids in sequences(model.tokenizer, text, tokens, int(count))]
    firsts = parts[:: int(count)]
    curves = {key: [] for key in chosen}
    model.attention.calibrated = curves
    for text, ids in firsts:
        model.hidden(ids, Method("pattern", "causal"))
        print(f"calibrated with {text}", file=sys.stderr, flush=True)
    model.attention.calibrated = None
    methods: dict[str, Method] = {"sdpa": Method("sdpa")}
    for density in densities:
        for key in chosen:
            kind, what, by = key
            curve = torch.tensor(curves[key]).mean(0).tolist()
            at = at_density(curve, GRIDS[by], density)
            name = what or kind if by == "mass" else f"{what} by block_mass"
            methods[f"{name} {density}"] = Method(kind, what, by, at)
        methods[f"window {density}"] = Method("pattern", window(tokens, density))
    results: dict[str, dict[str, list]] = {}
    for text, ids in parts:
        target = ids[0, tokens // 4 :]
        began = time.perf_counter()
        dense = model.hidden(ids, Method("pattern", "causal"))
        times = [time.perf_counter() - began, model.attention.seconds]
        results.setdefault("dense", {}).setdefault("seconds", []).append(times)
        for name, method in methods.items():
            first = any(ids is own for _, own in firsts)
            if method.kind == "exact" and not first:
                continue
            began = time.perf_counter()
            hidden = model.hidden(ids, method)
            times = [time.perf_counter() - began, model.attention.seconds]
            divergence, loss, change = model.compare(dense, hidden, target)
            own = results.setdefault(name, {})
            found = model.attention.densities or [1.0]
            for key, value in (
                ("divergence", divergence), ("loss", loss), ("change", change), ("first", torch.tensor(first).expand_as(loss)),
                ("density", sum(found) / len(found)), ("seconds", times),
            ):
                own.setdefault(key, []).append(value)
            print(
                f"{text.rsplit('/', 1)[-1]}: {name}: density {own['density'][-1]:.4f}, KL {divergence.mean():.5f}, "
                f"loss {loss.mean():.4f} {change.mean():+.4f}, {times[0]:.1f} s, attention {times[1]:.1f} s",
                file=sys.stderr, flush=True,
            )
    summary = []
    for name, own in results.items():
        mean = lambda key, own=own: torch.cat(own[key]).mean().item() if key in own else None
        summary.append({
            "method": name,
            "threshold": methods[name].threshold if name in methods else None,
            "pattern": methods[name].what if name in methods and methods[name].kind == "pattern" else None,
            "density": sum(own.get("density", [1.0])) / len(own.get("density", [1.0])),
            "kl": mean("divergence"), "loss": mean("loss"), "change": mean("change"),
            "scored": sum(map(len, own.get("loss", []))),
            "seconds": [sum(column) / len(column) for column in zip(*own["seconds"])],
        })
        print(json.dumps(summary[-1]))
    ratios = []
    for density in densities:
        for ours in ("clusters", "clusters by block_mass"):
            for theirs in ("antidiagonals", "window", "exact"):
                pair = [results.get(f"{name} {density}") for name in (ours, theirs)]
                if None in pair:
                    continue
                values = [torch.cat(own["divergence"]) for own in pair]
                if theirs == "exact":
                    values[0] = values[0][torch.cat(pair[0]["first"])]
                ratio, low, high = ratio_interval(*values)
                ratios.append({"density": density, "ours": ours, "theirs": theirs, "ratio": ratio, "interval": [low, high]})
                print(f"{density}: KL of {ours} : {theirs} {ratio:.3f}, 95 % interval {low:.3f} to {high:.3f}")
    with open(out, "w") as target:
        about = {"model": file, "dtype": dtype, "tokens": tokens, "texts": [text.rsplit("/", 1)[-1] for text in texts]}
        json.dump({**about, "methods": summary, "ratios": ratios}, target, indent=1)


if __name__ == "__main__":
    main()
