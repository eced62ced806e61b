"""A model of transformers by FlexAttention: padding, gradients, and decoding with a cache."""

import pytest
import torch
from interpreter import InterpretedCuda
from operators import TILES

from longspan.torch._engine import in_place_of
from longspan.torch._flex import FlexEngine

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")


def test_a_model_with_a_window_and_padding():
    import longspan.transformers

    longspan.transformers.register()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=24, attn_implementation="longspan",
    )
    model = transformers.MistralForCausalLM(config).eval()
    ids = torch.randint(64, (2, 40))
    padding = torch.ones_like(ids)
    padding[0, :7] = 0

    def results():
        model.zero_grad()
        out = model(ids, attention_mask=padding, use_cache=True)
        out.logits[padding.bool()].square().mean().backward()
        with torch.no_grad():
            longer = torch.cat([padding, padding[:, -1:]], 1)
            step = model(ids[:, :1], attention_mask=longer, past_key_values=out.past_key_values)
        gradient = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
        return out.logits[padding.bool()].detach(), gradient, step.logits

    own = results()
    backend = InterpretedCuda()
    engine = FlexEngine(backend=backend, dynamic=False, options=dict.fromkeys(TILES, 64))
    with in_place_of("cpu", engine), backend.watch() as launches:
        other = results()
    assert [launch.attention for launch in launches if launch.attention] == ["forward", "backward", "decode"]
    for a, b in zip(own, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
