"""Passkeys at ten depths of a long prompt: does a model that reads it with a selector find them as the dense one does?

    passkeys.py MODEL_DIR GGUF_FILE f32|bf16 TOKENS BLOCK_MASS TEXT

Ten sentences, each with the number of a city, stand at ten depths of the text. The prompt is read once, by a selector that
keeps blocks with at least BLOCK_MASS of their row's mass; then every city's number is asked for, from the same cache and
with dense attention.
"""

from __future__ import annotations

import copy
import sys

import torch
from models import load
from transformers import DynamicCache

import longspan
import longspan.torch

CITIES = ["Lagos", "Quito", "Oslo", "Perth", "Kyoto", "Turin", "Accra", "Lima", "Tunis", "Bergen"]
ALWAYS = "window(64, 0) | sinks(1)"


def main() -> None:
    folder, file, dtype, tokens, least, path = sys.argv[1:]
    selector = longspan.BlockSelector("causal", always=ALWAYS, mass=1.0, block_mass=float(least))
    state = {"adaptive": False, "densities": []}

    def attention(module, q, k, v, mask, scaling=None, **_):
        pattern = "causal"
        if state["adaptive"] and q.shape[2] == k.shape[2]:
            selection = selector.select(q, k, scale=scaling)
            pattern = selection.layout
            state["densities"].append(selection.density)
        out = longspan.torch.attention(q, k, v, pattern, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    types = {"f32": torch.float32, "bf16": torch.bfloat16}
    model, tokenizer = load(folder, file, types[dtype], attention)
    with open(path, errors="ignore") as source:
        text = source.read()
    numbers = [(7919 * (index + 3) ** 3) % 90_000 + 10_000 for index in range(len(CITIES))]
    words = tokenizer(text[len(text) // 2 :][: 8 * int(tokens)]).input_ids
    share = (int(tokens) - 40 * len(CITIES) - 64) // len(CITIES)
    prompt: list[int] = []
    for index, (city, number) in enumerate(zip(CITIES, numbers)):
        prompt += words[index * share : index * share + share // 2]
        prompt += tokenizer(f"\n\nThe secret passkey of {city} is {number}. Remember it.\n\n").input_ids
        prompt += words[index * share + share // 2 : (index + 1) * share]
    for adaptive in (False, True):
        state["adaptive"], state["densities"] = adaptive, []
        cache = DynamicCache(config=model.config)
        model(torch.tensor([prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        density = sum(state["densities"]) / max(len(state["densities"]), 1) if adaptive else 1.0
        found = []
        for city, number in zip(CITIES, numbers):
            own = copy.deepcopy(cache)
            ids = tokenizer(f"\n\nThe secret passkey of {city} is").input_ids
            answer: list[int] = []
            for _ in range(8):
                logits = model(torch.tensor([ids]), past_key_values=own, use_cache=True, logits_to_keep=1).logits
                ids = [int(logits[0, -1].argmax())]
                answer += ids
            found.append(str(number) in tokenizer.decode(answer))
            print(f"  {city}: {number}, answered {tokenizer.decode(answer)!r}", file=sys.stderr, flush=True)
        name = "adaptive" if adaptive else "dense"
        print(f"{name}: {len(prompt)} tokens, density {density:.4f}, {sum(found)} of {len(found)} found: {found}", flush=True)


if __name__ == "__main__":
    main()
