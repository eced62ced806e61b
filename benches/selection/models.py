"""Pretrained models whose attention is replaced by a function of this benchmark, and the tokens they read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def load(folder: str, file: str, dtype: torch.dtype, attention: Callable) -> tuple[nn.Module, Callable]:
    """The model of a GGUF file, and its tokenizer."""
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # Dense weights: products with packed ones are several times slower.
    packed = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype, quantization_config=packed)
    model.eval()
    ALL_ATTENTION_FUNCTIONS.register("measured", attention)
    model.set_attn_implementation("measured")
    return model, tokenizer


def sequences(tokenizer: Callable, path: str, tokens: int, count: int) -> list[Tensor]:
    """So many sequences of a text, evenly spread over it, `[1, tokens]` each."""
    with open(path, errors="ignore") as source:
        text = source.read()
    found = []
    for index in range(count):
        # Not from the start: files begin with tables of contents.
        words = text[len(text) * (index + 1) // (count + 1) :][: 8 * tokens]
        ids = tokenizer(words).input_ids[:tokens]
        if len(ids) < tokens:
            raise SystemExit(f"{path} is too short for {count} sequences of {tokens} tokens")
        found.append(torch.tensor([ids]))
    return found
