"""Models that compute their attention themselves are refused, and so is a pattern that a model would ignore."""

import importlib
import logging

import pytest
import torch
import transformers
from families import own_attention
from tiny import MODELS, SIZES, tokens
from transformers import PreTrainedModel

import longspan.transformers
from longspan.transformers import _support

# Of modules of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")

PATTERN = "window(5, 0) | sinks(2)"
longspan.transformers.register("longspan_for_own_attention", PATTERN)


def kinds(module):
    """The models of a module of transformers."""
    found = vars(importlib.import_module(f"transformers.models.{module}")).values()
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, PreTrainedModel)]
    return [kind for kind in kinds if kind.__module__.endswith(module) and kind.config_class is not None]


@pytest.mark.parametrize("module", own_attention())
def test_refused_when_made(module):
    assert kinds(module)
    for kind in kinds(module):
        if kind.__name__ == "LayoutLMv2Model" and not transformers.utils.is_detectron2_available():
            continue
        with pytest.raises(ValueError, match=f"^{kind.__name__} computes its attention itself, so attn_impl"):
            kind(kind.config_class(attn_implementation="longspan"))
        with pytest.raises(ValueError, match=r"and would ignore the pattern window\(5, 0\) \| sinks\(2\), so"):
            kind(kind.config_class(attn_implementation="longspan_for_own_attention"))


def test_all_are_looked_at():
    """Those that the issue names are among them."""
    folders = {module.split(".")[0] for module in own_attention()}
    named = "bloom mpt falcon gptj codegen deberta deberta_v2 longformer xlnet big_bird reformer led gpt_neo"
    assert folders >= set(named.split())


def bloom():
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=101, hidden_size=64, n_layer=2, n_head=4))


def test_other_names_go_on():
    model = bloom()
    assert model.config._attn_implementation == "eager"
    assert model(input_ids=tokens(1, 9)).logits.shape == (1, 9, 101)


def test_changed_later(caplog):
    """transformers warns, and the model goes on as before; with a pattern it is an error."""
    model = bloom()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model.set_attn_implementation("longspan")
    finally:
        logger.removeHandler(caplog.handler)
    assert "does not support setting its attention implementation" in caplog.text
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="BloomForCausalLM computes its attention itself and would ignore"):
        model.set_attn_implementation("longspan_for_own_attention")
    with pytest.raises(ValueError, match="BloomAttention .transformer.h.0.self_attention. computes its attention"):
        longspan.transformers.set_pattern(model, PATTERN)


def test_subclass():
    """A class of one's own has the attention of the class that it is made from."""

    class Mine(transformers.BloomForCausalLM):
        pass

    with pytest.raises(ValueError, match="Mine computes its attention itself"):
        Mine(transformers.BloomConfig(attn_implementation="longspan"))


def test_layers_beside_others():
    """One layer of the model calls the attention that is registered, another one doesn't."""
    kind = transformers.BigBirdPegasusForConditionalGeneration
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = transformers.BigBirdPegasusConfig(
        **sizes, vocab_size=101, encoder_attention_heads=2, decoder_attention_heads=2
    )
    message = "BigBirdPegasusBlockSparseAttention .* computes its attention itself and would ignore"
    with pytest.raises(ValueError, match=message):
        kind._from_config(config, attn_implementation="longspan_for_own_attention")
    model = kind._from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation("longspan_for_own_attention")
    with pytest.raises(ValueError, match=message):
        longspan.transformers.set_pattern(model, PATTERN)


def test_models_without_attention():
    sizes = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    transformers.FNetModel(transformers.FNetConfig(**sizes, attn_implementation="longspan"))
    with pytest.raises(ValueError, match="FNetModel has no layer that calls the attention which is registered"):
        transformers.FNetModel(transformers.FNetConfig(**sizes, attn_implementation="longspan_for_own_attention"))
    with pytest.raises(ValueError, match="Linear has no layer that calls the attention"):
        longspan.transformers.set_pattern(torch.nn.Linear(2, 2), PATTERN)


def test_masks_used_as_tensors():
    """A model that adds its own numbers to the mask."""
    config = transformers.DogeConfig(**SIZES, num_key_value_heads=2, attn_implementation="longspan")
    with pytest.raises(AttributeError, match="mask of longspan is asked for dtype, expected it handed on to attention"):
        transformers.DogeForCausalLM(config)(input_ids=tokens(1, 9))
    found = longspan.transformers._mask.mask(
        batch_size=1, q_length=3, kv_length=3, mask_function=transformers.masking_utils.causal_mask_function
    )
    with pytest.raises(NotImplementedError, match="mask of longspan is sliced"):
        found[:, :, :, :2]
    with pytest.raises(NotImplementedError, match="mask of longspan is given to torch's add"):
        torch.zeros(1) + found
    with pytest.raises(NotImplementedError, match="mask of longspan is given to torch's where"):
        torch.where(found, 0.0, 1.0)


def test_patterns_that_would_be_ignored_later():
    model = MODELS["llama"]()
    with pytest.raises(ValueError, match='LlamaAttention uses attn_implementation="eager", which would ignore'):
        longspan.transformers.set_pattern(model, PATTERN)
    model.set_attn_implementation("longspan")
    longspan.transformers.set_pattern(model, PATTERN)
    with pytest.raises(ValueError, match='has a pattern, which attn_implementation="eager" would ignore'):
        model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match='has a pattern, which attn_implementation="sdpa" would ignore'):
        model.set_attn_implementation({"": "sdpa"})
    longspan.transformers.set_pattern(model, None)
    model.set_attn_implementation("eager")


def llava(attn_implementation):
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=4),
        text_config=transformers.LlamaConfig(**SIZES),
        image_token_index=100,
    )
    return transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation=attn_implementation)


def test_parts():
    """A name, a pattern and what would ignore it are looked at for each part of a model."""
    longspan.transformers.register("longspan_by_layer_of_llava", lambda *layer: PATTERN)
    with pytest.raises(ValueError, match="CLIPAttention has no layer_idx"):
        llava("longspan_by_layer_of_llava")
    model = llava({"": "sdpa", "text_config": "longspan_by_layer_of_llava", "vision_config": "sdpa"})
    assert model(input_ids=tokens(1, 9)).logits.shape == (1, 9, 101)
    longspan.transformers.set_pattern(model.model.language_model, PATTERN)
    model.set_attn_implementation({"vision_config": "eager"})
    with pytest.raises(ValueError, match='LlamaAttention has a pattern, which attn_implementation="eager"'):
        model.set_attn_implementation({"text_config": "eager"})
    with pytest.raises(ValueError, match='LlamaAttention has a pattern, which attn_implementation="eager"'):
        model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match='CLIPAttention uses attn_implementation="eager", which would ignore'):
        longspan.transformers.set_pattern(model, PATTERN)


def test_registered_twice():
    """The checks are added once, however often a name is registered."""
    before = PreTrainedModel.post_init
    longspan.transformers.register()
    assert PreTrainedModel.post_init is before
    assert before.__wrapped__.__module__ == "transformers.modeling_utils"
    assert _support.patterns["longspan"] is None
    with pytest.raises(ValueError, match="'longspan_for_own_attention', which is registered with a pattern"):
        longspan.transformers.register("longspan_for_own_attention")
