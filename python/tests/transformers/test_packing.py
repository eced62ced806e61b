"""``DataCollatorWithFlattening(return_flash_attn_kwargs=True)``: sequences side by side, each as if alone."""

import pytest
import torch
from families import FAMILIES, made
from tiny import MODELS, TOLERANCE, apart, tokens
from transformers import DataCollatorWithFlattening

import longspan.transformers

LENGTHS = [13, 1, 20, 7]


def sequences():
    return [tokens(1, length, seed=length)[0] for length in LENGTHS]


def batch(**options):
    collator = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True, **options)
    found = collator([{"input_ids": ids.tolist()} for ids in sequences()])
    found.pop("labels")
    return found


def run(model, **given):
    model.zero_grad()
    logits = model(**given).logits
    (logits * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return logits.detach()


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_each_sequence_as_if_alone(name, use_cache):
    """Also with a cache, where transformers finds no packing in position_ids."""
    model = MODELS[name]()
    expected, sums = [], None
    for ids in sequences():
        expected.append(run(model, input_ids=ids[None]))
        found = gradients(model)
        sums = found if sums is None else {key: sums[key] + found[key] for key in sums}
    model.set_attn_implementation("longspan")
    got = run(model, **batch(), use_cache=use_cache)
    assert apart(got, torch.cat(expected, 1)) < TOLERANCE
    for key, gradient in gradients(model).items():
        assert apart(gradient, sums[key]) < TOLERANCE, key


def test_encoder():
    """transformers looks for packing in causal models alone."""
    model = made(FAMILIES["BERT"])
    model.set_attn_implementation("eager")
    expected = torch.cat([model(input_ids=ids[None]).logits.detach() for ids in sequences()], 1)
    model.set_attn_implementation("longspan")
    assert apart(model(**batch()).logits.detach(), expected) < TOLERANCE


def test_pattern_counts_within_each():
    model = MODELS["llama"]()
    model.set_attn_implementation("longspan")
    longspan.transformers.set_pattern(model, "window(2, 0) | sinks(1)")
    expected = torch.cat([model(input_ids=ids[None]).logits.detach() for ids in sequences()], 1)
    for use_cache in (False, True):
        assert apart(model(**batch(), use_cache=use_cache).logits.detach(), expected) < TOLERANCE


def changed(**changes):
    return {**batch(), "use_cache": False, **changes}


BOUNDS = torch.tensor([0, 14, 34, 41], dtype=torch.int32)


@pytest.mark.parametrize(
    "given, message",
    [
        (
            changed(cu_seq_lens_q=BOUNDS, cu_seq_lens_k=BOUNDS),
            r"cu_seq_lens_q is \[0, 14, 34, 41\], and position_ids restart at \[\[0, 13, 14, 34, 41\]\]",
        ),
        (changed(cu_seq_lens_k=BOUNDS), "cu_seq_lens_k is .*, expected the same"),
        (changed(cu_seq_lens_k=None), "expected cu_seq_lens_q and cu_seq_lens_k too"),
        (changed(max_length_k=19), "max_length_k is 19, expected at least 20"),
        (
            changed(cu_seq_lens_q=BOUNDS[:-1], cu_seq_lens_k=BOUNDS[:-1], position_ids=None),
            "cu_seq_lens_q ends at 34, with 1 batch entries of 41 tokens",
        ),
        (
            changed(attention_mask=torch.tensor([[0] * 3 + [1] * 38])),
            "cu_seq_lens_q with 41 queries from 0 on, 41 keys from 0 on and the mask causal with padding",
        ),
        (changed(seq_idx=torch.zeros((1, 41))), "seq_idx is given, but packing is read from position_ids"),
    ],
)
def test_contradictions(given, message):
    model = MODELS["llama"]()
    model.set_attn_implementation("longspan")
    with pytest.raises((ValueError, NotImplementedError), match=message):
        model(**given)


def test_chunks():
    """Chunks count from the first token of all."""
    model = made(FAMILIES["Llama 4"])
    model.set_attn_implementation("longspan")
    with pytest.raises((ValueError, NotImplementedError), match=r"dilated\(16, 1\)"):
        model(**batch(), use_cache=True)
