"""Dropout on attention weights is refused, and the message names the field of the config that asks for it."""

import dataclasses
import re
import types

import pytest
import torch
import transformers
from families import FAMILIES, config_of
from tiny import tokens

from longspan.transformers._attention import attention

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")

#: Drops whole layers or paths, or says how.
OTHERS = ("layerdrop", "path", "token_dropout", "classifier", "summary")

#: Families whose configs have dropouts under other names, or other ones.
TITLES = (
    *("ALBERT", "BART", "BERT", "BioGPT", "CTRL", "DINOv2", "DistilBERT", "ELECTRA", "ERNIE 4.5", "ESM", "Gemma 2"),
    *("GPT-2", "GPT-NeoX", "GPTBigCode", "LFM2", "Llama", "M2M100", "MobileBERT", "ModernBERT", "Nomic BERT", "OPT"),
    *("Pegasus", "Phi", "PhiMoE", "Qwen3", "RoBERTa", "SigLIP vision", "StableLM", "Starcoder 2", "T5Gemma", "ViT"),
)
#: Families that have no dropout on attention weights, or have it in the config of a part.
WITHOUT = ("CTRL", "ERNIE 4.5", "LFM2", "T5Gemma")


def message_of(model, family):
    """The message of a training pass, or none."""
    given = {"input_ids": tokens(2, 9)}
    if family.kind == "vision":
        given = {"pixel_values": torch.zeros((1, 3, 48, 48))}
    if family.kind == "encoder-decoder":
        given["decoder_input_ids"] = tokens(2, 7)
    try:
        model.train()(**given)
    except NotImplementedError as error:
        return str(error)
    return None


def model_with(family, dropouts):
    config = config_of(family)
    for name, value in dropouts.items():
        setattr(config, name, value)
    return getattr(transformers, family.model)._from_config(config, attn_implementation="longspan")


@pytest.mark.parametrize("title", TITLES)
def test_named_field(title):
    """Every dropout has a value of its own: the one that is named is the one that was refused, and the only one."""
    family = FAMILIES[title]
    fields = [field.name for field in dataclasses.fields(config_of(family))]
    names = [name for name in fields if "drop" in name and not any(part in name for part in OTHERS)]
    dropouts = {name: round(0.11 + 0.01 * number, 2) for number, name in enumerate(names)}
    message = message_of(model_with(family, dropouts), family)
    if message is None:
        assert title in WITHOUT
        return
    assert title not in WITHOUT
    said = r"a dropout of (\S+) on attention weights, expected 0: set config\.(\w+) = 0"
    value, name = re.match(said, message).groups()
    assert dropouts[name] == float(value)
    assert message_of(model_with(family, {**dropouts, name: 0.0}), family) is None


@pytest.mark.parametrize(
    "kind, config, field",
    [
        ("BertModel", {}, "attention_probs_dropout_prob"),
        ("RobertaModel", {}, "attention_probs_dropout_prob"),
        ("GPT2Model", {}, "attn_pdrop"),
        ("DistilBertModel", {}, "attention_dropout"),
        ("LlamaModel", {"attention_dropout": 0.1, "num_attention_heads": 6}, "attention_dropout"),
        ("BartModel", {"attention_dropout": 0.1}, "attention_dropout"),
        ("T5EncoderModel", {}, "dropout_rate"),
    ],
)
def test_default_values(kind, config, field):
    """Where other dropouts have the same value, the name says which one is about attention."""
    kind = getattr(transformers, kind)
    small = {"vocab_size": 101, "num_hidden_layers": 1, "n_layer": 1, "n_layers": 1, "num_layers": 1}
    small.update({"hidden_size": 96, "n_embd": 96, "dim": 96, "d_model": 64, "intermediate_size": 96, "hidden_dim": 96})
    small.update({"encoder_layers": 1, "decoder_layers": 1})
    sizes = {name: value for name, value in small.items() if name in kind.config_class.__dataclass_fields__}
    model = kind(kind.config_class(**sizes, **config, attn_implementation="longspan")).train()
    with pytest.raises(NotImplementedError, match=rf"a dropout of 0.1 .*: set config\.{field} = 0 before"):
        model(input_ids=tokens(1, 9))
    if field != "dropout_rate":
        assert model.eval()(input_ids=tokens(1, 9)).last_hidden_state.shape[:2] == (1, 9)


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"attention_dropout": 0.2, "dropout_rate": 0.3}, "config.dropout_rate"),
        ({"hidden_dropout": 0.3, "attn_pdrop": 0.3, "attention_heads": 0.3}, "config.attn_pdrop"),
        ({"attention_dropout": 0.2}, "the dropout of Module"),
        (None, "the dropout of Module"),
    ],
)
def test_fields(fields, named):
    module = torch.nn.Module()
    if fields is not None:
        module.config = types.SimpleNamespace(**fields)
    q = torch.zeros((1, 1, 2, 16))
    with pytest.raises(NotImplementedError, match=f"set {named} = 0 before"):
        attention(module, q, q, q, None, dropout=0.3)
