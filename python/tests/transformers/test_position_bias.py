"""Biases of relative positions are tables: no tensor of queries by keys is made, gradients reach the embedding on every
way, and what is no table is refused. That outputs are eager attention's is in ``test_families.py``."""

import copy

import pytest
import torch
import transformers
from families import FAMILIES, made
from tiny import TOLERANCE, apart, padding, tokens, with_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.t5.modeling_t5 import T5Attention

import longspan.transformers

SMALL = {"vocab_size": 101, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
TABLES = ("T5", "mT5", "UMT5", "LongT5")


def inputs(count=37, decoder=21):
    held = padding("right", [count, 23], count)
    return {"input_ids": tokens(2, count), "attention_mask": held, "decoder_input_ids": tokens(2, decoder, seed=7)}


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator returned. Memory of zeros is not touched."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is not torch.ops.aten.zeros.default:
            found = [x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.elements = max([self.elements, *found])
        return out


@pytest.mark.parametrize("title", ["T5", "mT5", "UMT5"])
def test_memory(title):
    """Tensors grow with tokens, not with pairs."""
    count = 1200
    given = {"input_ids": tokens(1, count), "decoder_input_ids": tokens(1, count, seed=7)}

    def largest(model):
        with Largest() as seen:
            model(**given).logits.sum().backward()
        return seen.elements

    model = made(FAMILIES[title])
    assert with_attention(model, "eager", largest) >= 4 * count * count
    assert with_attention(model, "longspan", largest) <= 101 * count < count * count


def gradients(model):
    model.zero_grad()
    out = model(**inputs()).logits
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("title", ["T5", "UMT5"])
def test_gradient_checkpointing(title, reentrant):
    model = copy.deepcopy(made(FAMILIES[title]))
    expected = with_attention(model, "eager", gradients)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    got = with_attention(model.train(), "longspan", gradients)
    assert got.keys() == expected.keys()
    biases = [name for name in got if "relative_attention_bias" in name]
    assert len(biases) == (2 if title == "T5" else 4)
    for name in got:
        assert apart(got[name], expected[name]) < TOLERANCE, name


@pytest.mark.parametrize("title", ["T5", "UMT5"])
def test_compiled(title):
    torch._dynamo.reset()
    model = made(FAMILIES[title])
    model.set_attn_implementation("longspan")
    given = {**inputs(), "decoder_attention_mask": torch.ones((2, 21), dtype=torch.int64), "use_cache": False}
    with torch.no_grad():
        expected = model(**given).logits
        # Without a C++ compiler.
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(**given).logits
    assert apart(got, expected) < TOLERANCE


@pytest.mark.parametrize("title", TABLES)
def test_loaded_and_copied(title, tmp_path):
    model = made(FAMILIES[title])
    with torch.no_grad():
        expected = with_attention(model, "eager", lambda m: m(**inputs()).logits)
        got = with_attention(model, "longspan", lambda m: copy.deepcopy(m)(**inputs()).logits)
        assert apart(got, expected) < TOLERANCE
        # A file has embeddings that are tied.
        model = type(model)._from_config(model.config, attn_implementation="eager").eval()
        expected = model(**inputs()).logits
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, attn_implementation="longspan").eval()
        assert apart(loaded(**inputs()).logits, expected) < TOLERANCE


def test_beams():
    def generated(model):
        return model.generate(**{**inputs(), "decoder_input_ids": None}, num_beams=3, max_new_tokens=9, do_sample=False)

    model = made(FAMILIES["T5"])
    assert torch.equal(with_attention(model, "longspan", generated), with_attention(model, "eager", generated))


def test_pattern():
    """With a user pattern, against eager attention with the same pairs."""
    torch.manual_seed(3)
    model = transformers.T5EncoderModel._from_config(transformers.T5Config(**SMALL), attn_implementation="eager")
    model.eval().requires_grad_(False)
    pairs = torch.tensor([[abs(q - k) < 6 or k < 2 for k in range(37)] for q in range(37)])
    added = torch.zeros((2, 1, 37, 37)).masked_fill(~pairs, torch.finfo(torch.float32).min)
    expected = model(input_ids=tokens(2, 37), attention_mask=added).last_hidden_state
    model.set_attn_implementation("longspan")
    longspan.transformers.set_pattern(model, "window(5, 5) | sinks(2)")
    assert apart(model(input_ids=tokens(2, 37)).last_hidden_state, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["Pix2StructTextModel", "Pop2PianoForConditionalGeneration"])
def test_relatives(name):
    """Models with parts of other kinds, whose text layers are T5's."""
    kind = getattr(transformers, name)
    options = {"hidden_size": 64, "initializer_range": 0.02} if name.startswith("Pix") else {}
    torch.manual_seed(3)
    model = kind._from_config(kind.config_class(**SMALL, **options), attn_implementation="eager").eval()
    for module in model.modules():
        if getattr(module, "has_relative_attention_bias", False):
            torch.nn.init.normal_(module.relative_attention_bias.weight, std=2)
    given = {"input_ids": tokens(2, 37)}
    if not options:
        given = {"inputs_embeds": torch.randn(2, 37, 64), "decoder_input_ids": tokens(2, 21)}
    with torch.no_grad():
        expected = model(**given).logits
        got = with_attention(model, "longspan", lambda m: m(**given).logits)
    assert apart(got, expected) < TOLERANCE


def test_tensors_are_refused():
    model = made(FAMILIES["T5"])
    model.set_attn_implementation("longspan")
    layer = model.encoder.block[1].layer[0].SelfAttention
    with pytest.raises(NotImplementedError, match="T5Attention hands over position_bias, a bias of every pair"):
        layer(torch.zeros((1, 5, 64)), position_bias=torch.zeros((1, 4, 5, 5)))


def test_udop():
    """Its biases are those of places on a page too."""
    config = transformers.UdopConfig(**SMALL, image_size=32, patch_size=8)
    model = transformers.UdopForConditionalGeneration._from_config(config, attn_implementation="longspan")
    page = {"bbox": torch.zeros((1, 9, 4)), "pixel_values": torch.zeros((1, 3, 32, 32))}
    with pytest.raises(NotImplementedError, match="UdopAttention hands over position_bias, a bias of every pair"):
        model(input_ids=tokens(1, 9), **page, decoder_input_ids=tokens(1, 5))


class Odd(T5Attention):
    """Its biases grow with positions."""

    def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0):
        rows = torch.arange(query_length)[:, None] + past_seen_tokens
        return (rows * torch.arange(key_length)).float().expand(1, self.n_heads, -1, -1)


class Longer(T5Attention):
    """Its biases change past the largest distance of its config."""

    def _relative_position_bucket(self, relative_position, **options):
        return super()._relative_position_bucket(relative_position, **{**options, "max_distance": 200})


@pytest.mark.parametrize("kind", [Odd, Longer])
def test_other_meanings(kind):
    config = transformers.T5Config(**SMALL, attn_implementation="eager")
    model = transformers.T5EncoderModel(config)
    model.encoder.block[0].layer[0].SelfAttention = kind(model.encoder.config, has_relative_attention_bias=True)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=f"{kind.__name__} of this release .* no table over distances up to 128"):
        model.set_attn_implementation("longspan")
    assert model.encoder.config._attn_implementation == "sdpa"
