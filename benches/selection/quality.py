"""What a choice of key blocks costs a real language model: KL divergence of its logits to the dense model's, and loss.

    quality.py MODEL_DIR GGUF_FILE TOKENS DENSITY TEXT...

Per text file, the model reads TOKENS tokens at once with every method, each tuned so that the mean density of causal
blocks over all layers and heads is DENSITY. Logits of the second half are compared. Intervals are 95 %, by resampling
stretches of 64 tokens of all texts. Lines of JSON follow the table.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import longspan
import longspan.torch

BLOCK = 64
ALWAYS = "window(64, 0) | sinks(1)"
STRETCH = 64


def selector(estimator: str) -> Callable[[float], longspan.BlockSelector]:
    return lambda mass: longspan.BlockSelector("causal", always=ALWAYS, estimator=estimator, mass=mass)


class Attention:
    """What layers call: attention over a layout, whose blocks are counted."""

    def __init__(self) -> None:
        self.method: longspan.BlockSelector | str = "causal"
        self.densities: list[float] = []

    def __call__(self, module, q: Tensor, k: Tensor, v: Tensor, mask, scaling=None, **_) -> tuple[Tensor, None]:
        if isinstance(self.method, str):
            pattern = self.method
            tokens = q.shape[2]
            every = longspan.causal().compile(tokens).active_blocks
            self.densities.append(longspan.Pattern(pattern).compile(tokens).active_blocks / every)
        else:
            selection = self.method.select(q, k, scale=scaling)
            pattern = selection.layout
            self.densities.append(selection.density)
        out = longspan.torch.attention(q, k, v, pattern, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    @property
    def density(self) -> float:
        return sum(self.densities) / len(self.densities)


def run(model, attention: Attention, method: longspan.BlockSelector | str, ids: Tensor) -> Tensor:
    """Log-probabilities of the second half."""
    attention.method, attention.densities = method, []
    logits = model(ids, logits_to_keep=ids.shape[1] // 2).logits[0, :-1]
    return logits.float().log_softmax(-1)


def tuned(model, attention: Attention, make: Callable, ids: Tensor, density: float) -> tuple[float, Tensor]:
    """The mass at which the density is met within 1 %, by bisection of its logit."""
    low, high = -4.0, 10.0
    for _ in range(10):
        middle = (low + high) / 2
        mass = 1 / (1 + math.exp(-middle))
        logits = run(model, attention, make(mass), ids)
        if abs(attention.density / density - 1) < 0.01:
            break
        low, high = (middle, high) if attention.density < density else (low, middle)
    return mass, logits


def window(tokens: int, density: float) -> str:
    """The widest window with a sink that has at most this density."""
    blocks = tokens // BLOCK
    every = blocks * (blocks + 1) / 2
    fitting = 1
    for width in range(1, blocks):
        pattern = f"causal & (window({width * BLOCK}, 0) | sinks(1))"
        if longspan.Pattern(pattern).compile(tokens).active_blocks > density * every:
            break
        fitting = width
    return f"causal & (window({fitting * BLOCK}, 0) | sinks(1))"


def interval(values: Tensor) -> tuple[float, float]:
    stretches = values[: len(values) // STRETCH * STRETCH].unflatten(0, (-1, STRETCH)).mean(1)
    picks = torch.randint(len(stretches), (2000, len(stretches)), generator=torch.Generator().manual_seed(1))
    means = stretches[picks].mean(1)
    return means.quantile(0.025).item(), means.quantile(0.975).item()


def main() -> None:
    folder, file, tokens, density, *texts = sys.argv[1:]
    tokens, density = int(tokens), float(density)
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    attention = Attention()
    ALL_ATTENTION_FUNCTIONS.register("measured", attention)
    model.set_attn_implementation("measured")
    divergences: dict[str, list[Tensor]] = {}
    for text in texts:
        with open(text, errors="ignore") as source:
            words = source.read()
        # From the middle on: files begin with tables of contents.
        words = words[len(words) // 2 :][: 8 * tokens]
        ids = torch.tensor([tokenizer(words).input_ids[:tokens]])
        assert ids.shape[1] == tokens, f"{text} has {ids.shape[1]} tokens in its second half, expected {tokens}"
        dense = run(model, attention, "causal", ids)
        target = ids[0, -(tokens // 2) + 1 :]
        loss = -dense.gather(1, target[:, None])[:, 0]
        for name in ("clusters", "antidiagonals", "window"):
            mass = None
            if name == "window":
                found = run(model, attention, window(tokens, density), ids)
            else:
                mass, found = tuned(model, attention, selector(name), ids, density)
            divergence = (dense.exp() * (dense - found)).sum(-1)
            divergences.setdefault(name, []).append(divergence)
            change = (-found.gather(1, target[:, None])[:, 0] - loss).mean().item()
            record = {
                "text": text.rsplit("/", 1)[-1],
                "tokens": tokens,
                "method": name,
                "mass": mass,
                "density": attention.density,
                "kl": divergence.mean().item(),
                "loss": loss.mean().item(),
                "change": change,
            }
            print(json.dumps(record), flush=True)
    for name, values in divergences.items():
        low, high = interval(torch.cat(values))
        print(f"{name:14s} KL {torch.cat(values).mean():.5f}, 95 % interval {low:.5f} to {high:.5f}")
    ours = torch.cat(divergences["clusters"]).mean()
    for name in ("antidiagonals", "window"):
        print(f"clusters : {name} {ours / torch.cat(divergences[name]).mean():.3f}")


if __name__ == "__main__":
    main()
