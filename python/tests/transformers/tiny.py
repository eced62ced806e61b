"""Small models with random weights, and how outputs are compared.

Weights of queries and keys are larger than models begin with: scores reach several times the soft
cap, and weights differ by orders of magnitude, so that whatever is ignored is seen in the output.
"""

import torch
import transformers

VOCABULARY = 101
#: A prime, past two blocks of the smallest size, and not a multiple of a window.
TOKENS = 67
WINDOW = 7
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
#: How far outputs and gradients may be from those of eager attention, as a share of the largest
#: number. Both are f32 and sum the same terms in another order: up to 3e-6 was seen, on one kind of
#: CPU.
TOLERANCE = 1e-5


def llama(**options):
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **options)
    return _sharpened(transformers.LlamaForCausalLM, config)


def mistral(**options):
    config = transformers.MistralConfig(
        **SIZES, num_key_value_heads=2, sliding_window=WINDOW, **options
    )
    return _sharpened(transformers.MistralForCausalLM, config)


def gemma2(**options):
    config = transformers.Gemma2Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        # Not the head dim, so that the scale is not the default one.
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=3.0,
        # Tied, it would say the same token again and again.
        tie_word_embeddings=False,
        **options,
    )
    return _sharpened(transformers.Gemma2ForCausalLM, config)


def modernbert(**options):
    config = transformers.ModernBertConfig(
        **SIZES,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=2 * WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        **options,
    )
    return _sharpened(transformers.ModernBertForMaskedLM, config)


MODELS = {"llama": llama, "mistral": mistral, "gemma2": gemma2, "modernbert": modernbert}
DECODERS = ("llama", "mistral", "gemma2")


def _sharpened(kind, config):
    """Random weights, the same each time. Scores of queries and keys are spread over about ±10."""
    torch.manual_seed(11)
    model = kind._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)
            if any(part in name for part in ("q_proj", "k_proj", "Wqkv")):
                weight.mul_(2)
    return model.eval()


def tokens(batch, count=TOKENS, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, count), generator=generator)


def padding(side, lengths, count=TOKENS):
    """1 where there is a token: the first or the last of so many in each row."""
    at = torch.arange(count)
    if side == "left":
        at = at.flip(0)
    return (at[None] < torch.tensor(lengths)[:, None]).long()


def apart(a, b):
    """The largest difference, as a share of the largest number."""
    return float((a - b).abs().max() / b.abs().max())


def with_attention(model, name, call):
    """What ``call`` makes of a model that uses the attention ``name``."""
    model.set_attn_implementation(name)
    assert model.config._attn_implementation == name
    return call(model)
