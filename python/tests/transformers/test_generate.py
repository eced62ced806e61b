"""``generate`` gives the tokens of eager attention, whatever cache holds the keys."""

import pytest
import torch
import transformers
from tiny import DECODERS, MODELS, TOLERANCE, apart, padding, tokens, with_attention

import longspan.transformers._attention

#: Past the window, so that sliding caches drop keys already while they are filled.
PROMPT = 23
#: Past it once more.
NEW = 19
LENGTHS = [PROMPT, 11, 2]
SLOTS = 61

#: How keys are kept: arguments of ``generate``, made anew for each call.
CACHES = {
    # Sliding layers keep a window of keys, where a model has such layers.
    "dynamic": lambda model: {},
    "dynamic, every key": lambda model: {"past_key_values": transformers.DynamicCache()},
    "static": lambda model: {"cache_implementation": "static"},
    "static, more slots": lambda model: {
        "past_key_values": transformers.StaticCache(config=model.config, max_cache_len=SLOTS)
    },
    "none": lambda model: {"use_cache": False},
    "chunked prefill": lambda model: {"prefill_chunk_size": 5},
}


def prompt(side):
    ids = tokens(len(LENGTHS), PROMPT)
    mask = torch.ones_like(ids) if side == "none" else padding(side, LENGTHS, PROMPT)
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(model, side, cache):
    out = model.generate(
        **prompt(side),
        **CACHES[cache](model),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, PROMPT:], torch.stack(out.logits, 1)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", DECODERS)
def test_tokens(name, cache, side):
    model = MODELS[name]()
    expected, expected_logits = with_attention(model, "eager", lambda m: generated(m, side, cache))
    got, logits = with_attention(model, "longspan", lambda m: generated(m, side, cache))
    assert len(expected[0].unique()) > NEW // 4, "a model that repeats itself shows little"
    assert torch.equal(got, expected)
    assert apart(logits, expected_logits) < TOLERANCE


@pytest.mark.parametrize("name", DECODERS)
def test_caches_agree(name):
    """The tokens are the same ones for every cache, so eager's own answer is no accident."""
    model = MODELS[name]()
    model.set_attn_implementation("longspan")
    first, *others = [generated(model, "left", cache)[0] for cache in CACHES]
    for other in others:
        assert torch.equal(first, other)


@pytest.mark.parametrize(
    "cache, forgotten",
    [
        ("static", "query_offset"),
        ("static, more slots", "query_offset"),
        ("dynamic", "key_offset"),
        ("dynamic", "key_padding"),
        ("chunked prefill", "key_padding"),
    ],
)
def test_what_is_forgotten_is_seen(monkeypatch, cache, forgotten):
    """The comparison above would fail if an offset or padding were left to chance."""
    model = MODELS["mistral" if forgotten == "key_offset" else "llama"]()
    _, expected = with_attention(model, "eager", lambda m: generated(m, "left", cache))
    real = longspan.transformers._attention.over_pattern

    def forgetful(*args, **options):
        options[forgotten] = None
        return real(*args, **options)

    monkeypatch.setattr(longspan.transformers._attention, "over_pattern", forgetful)
    _, got = with_attention(model, "longspan", lambda m: generated(m, "left", cache))
    assert apart(got, expected) > 100 * TOLERANCE


@pytest.mark.parametrize("name", DECODERS)
def test_beams(name):
    """Beams reorder the cache between steps."""
    given = {**prompt("left"), "num_beams": 3, "max_new_tokens": 7, "do_sample": False}
    model = MODELS[name]()
    expected = with_attention(model, "eager", lambda m: m.generate(**given))
    assert torch.equal(with_attention(model, "longspan", lambda m: m.generate(**given)), expected)


@pytest.mark.parametrize("cache", [transformers.DynamicCache, transformers.StaticCache])
@pytest.mark.parametrize("name", DECODERS)
def test_passes_one_after_the_other(name, cache):
    """A cache that is filled by several passes of several tokens, as a chat does."""
    ids = tokens(2, 47)

    def run(model):
        options = {"max_cache_len": SLOTS} if cache is transformers.StaticCache else {}
        kept = cache(config=model.config, **options)
        parts = ids.split([5, 1, 13, 2, 26], 1)
        outputs = [model(input_ids=part, past_key_values=kept).logits.detach() for part in parts]
        return torch.cat(outputs, 1)

    model = MODELS[name]()
    expected = with_attention(model, "eager", run)
    assert apart(with_attention(model, "longspan", run), expected) < TOLERANCE
