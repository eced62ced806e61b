"""Models with ``attn_implementation="sdpa"`` while Longspan is torch's flash attention implementation."""

import pytest
import torch
from tiny import MODELS, TOLERANCE, VOCABULARY, apart, with_attention
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from longspan.torch import impl_calls

#: Long enough that masks of these models are read.
TOKENS = 211


def run(model, padded):
    ids = torch.arange(2 * TOKENS).view(2, -1) * 7919 % (VOCABULARY - 3) + 3
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 150:] = 0
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    ((losses * mask).sum() / mask.sum()).backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return logits.detach()[mask.bool()], gradients


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "modernbert"])
def test_outputs_and_gradients(name, padded):
    model = MODELS[name]()
    before, (expected, expected_gradients) = impl_calls(), with_attention(model, "sdpa", lambda m: run(m, padded))
    assert impl_calls() == before
    activate_flash_attention_impl("longspan")
    try:
        got, gradients = with_attention(model, "sdpa", lambda m: run(m, padded))
    finally:
        restore_flash_attention_impl()
    after = impl_calls()
    layers = model.config.num_hidden_layers
    assert (after.longspan - before.longspan, after.stock - before.stock) == (2 * layers, 0)
    assert apart(got, expected) < TOLERANCE
    for weight, gradient in gradients.items():
        assert apart(gradient, expected_gradients[weight]) < TOLERANCE, weight
    again, _ = with_attention(model, "sdpa", lambda m: run(m, padded))
    assert impl_calls() == after
    assert again.equal(expected)
