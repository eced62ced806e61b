"""What selectors keep of inputs whose structure is known, at equal density.

    synthetic.py [TOKENS [DENSITY]]

Kept mass of one head of 64 dims, by estimator and for a window with sinks; `exact` chooses by exact masses.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from quality import ALWAYS, exact_choice, exact_masses, window
from torch import Tensor

import longspan
import longspan.torch

DIM = 64


def noise(tokens: int, size: float = 1.0) -> Tensor:
    return torch.randn(tokens, DIM) * size


def needles(tokens: int) -> tuple[Tensor, Tensor]:
    """Every query looks for one of 16 single keys."""
    places = torch.randint(tokens // 2, (16,))
    k = noise(tokens)
    k[places] *= 2
    return noise(tokens, 0.5) + 0.7 * k[places[torch.randint(16, (tokens,))]], k


def columns(tokens: int) -> tuple[Tensor, Tensor]:
    """32 keys that all queries attend to."""
    direction = noise(1)
    k = noise(tokens)
    k[torch.randint(tokens, (32,))] += direction
    return noise(tokens) + direction, k


def slashes(tokens: int) -> tuple[Tensor, Tensor]:
    """Keys at three distances before each query."""
    k = noise(tokens)
    return sum(k.roll(distance, 0) for distance in (300, 1_000, 2_500)) + noise(tokens, 0.5), k


def documents(tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens of 12 topics, in stretches of about 200 tokens that come back."""
    topics = noise(12, 1.0)
    of = torch.randint(12, (tokens // 200 + 1,)).repeat_interleave(200)[:tokens]
    return topics[of] * 1.5 + noise(tokens, 0.5), topics[of] + noise(tokens, 0.5)


def peaked(tokens: int) -> tuple[Tensor, Tensor]:
    """Every query looks for a key of its own, anywhere before it."""
    k = noise(tokens)
    places = (torch.rand(tokens) * torch.arange(tokens)).long()
    return 2 * k[places], k


def flat(tokens: int) -> tuple[Tensor, Tensor]:
    """Nothing stands out."""
    return noise(tokens, 0.3), noise(tokens)


def tuned(density: float, choose: Callable[[float], tuple[longspan.Layout, float]]) -> tuple[longspan.Layout, float]:
    """The choice of a density, by bisection of the logit of a mass."""
    low, high = -6.0, 9.0
    for _ in range(14):
        middle = (low + high) / 2
        layout, found = choose(1 / (1 + math.exp(-middle)))
        low, high = (middle, high) if found < density else (low, middle)
    return layout, found


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    density = float(sys.argv[2]) if len(sys.argv) > 2 else 0.15
    torch.set_grad_enabled(False)
    names = ("exact", "clusters", "means", "antidiagonals", "window")
    print(f"kept mass at {density:.0%} of the causal blocks of {tokens} tokens (density that was met)\n")
    print(f"| input | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for make in (needles, columns, slashes, documents, peaked, flat):
        torch.manual_seed(1)
        q, k = (x[None, None] for x in make(tokens))
        masses = exact_masses(q[0], k[0], 1 / math.sqrt(DIM))
        full = longspan.torch.attention(q, k, k, "causal", return_lse=True)[1]

        def exact(mass: float) -> tuple[longspan.Layout, float]:
            kept = exact_choice(masses, mass)
            order = kept.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
            counts = kept.sum(-1, dtype=torch.int32)
            listed = longspan.ListedBlocks("causal", counts[None].numpy(), order[None].numpy())
            selection = listed.select(q, k, block=64)
            return selection.layout, selection.density

        cells = []
        for name in names:
            if name == "window":
                layout = longspan.Pattern(window(tokens, density)).compile(tokens)
                found = layout.active_blocks / longspan.causal().compile(tokens).active_blocks
            elif name == "exact":
                layout, found = tuned(density, exact)
            else:

                def select(mass: float) -> tuple[longspan.Layout, float]:
                    selector = longspan.BlockSelector(
                        "causal", always=ALWAYS, estimator=name, mass=mass, dense_below=0
                    )
                    selection = selector.select(q, k)
                    return selection.layout, selection.density

                layout, found = tuned(density, select)
            lse = longspan.torch.attention(q, k, k, layout, return_lse=True)[1]
            kept = (lse - full).double().exp().mean().item()
            cells.append(f"{kept:.3f} ({found:.2f})")
        print(f"| {make.__name__}: {make.__doc__.rstrip('.').lower()} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
