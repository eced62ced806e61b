"""Records queries and keys of layers of a pretrained model, after rotary embedding, for `longspan select`.

    record.py MODEL_DIR GGUF_FILE f32|bf16 TOKENS TEXT OUT_DIR LAYER...

Writes OUT_DIR/layer-N.safetensors with `q` and `k`, `[batch, heads, tokens, dim]` each.
"""

from __future__ import annotations

import pathlib
import sys

import torch
from models import load, sequences
from safetensors.torch import save_file

import longspan.torch


def main() -> None:
    folder, file, dtype, tokens, text, out, *layers = sys.argv[1:]
    target = pathlib.Path(out)
    target.mkdir(parents=True, exist_ok=True)
    wanted = {int(layer) for layer in layers}

    def attention(module, q, k, v, mask, scaling=None, **_):
        if module.layer_idx in wanted:
            named = {"q": q.contiguous(), "k": k.contiguous()}
            save_file(named, target / f"layer-{module.layer_idx}.safetensors")
            print(f"layer {module.layer_idx}: q {list(q.shape)}, k {list(k.shape)}", flush=True)
        out = longspan.torch.attention(q, k, v, "causal", scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    types = {"f32": torch.float32, "bf16": torch.bfloat16}
    model, tokenizer = load(folder, file, types[dtype], attention)
    (ids,) = sequences(tokenizer, text, int(tokens), 1)
    model(ids, logits_to_keep=1)


if __name__ == "__main__":
    main()
