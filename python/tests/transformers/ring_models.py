"""What each rank does in ``test_ring_models.py``: models of transformers that hold a part of a sequence.

Everything is compared with one process and eager attention. Weights and tokens are the same on every rank.
"""

import contextlib
import functools
import os
import re
import runpy
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import transformers
from families import FAMILIES, made
from tiny import VOCABULARY, apart, mistral, tokens

import longspan.transformers
from longspan import RingError
from longspan.torch import Shards, ring_loss, sum_gradients
from longspan.transformers import _families

#: A prime past 300, so that no number of ranks divides it.
TOKENS = 307
WINDOW = 40
SHARDS = ("contiguous", "zigzag", "striped")
PATTERN = "window(23, 0) | sinks(3)"
#: Packed sequences; shards end inside of them.
BOUNDS = torch.tensor([0, 130, 131, TOKENS], dtype=torch.int32)
PACKING = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 176, "max_length_k": 176}
#: How far results may be from those of one process, as a share of the largest number: the bound of ``tiny`` and as much
#: again, since gradients are sums of three ranks' parts. Up to 1.0e-5 was seen.
TOLERANCE = 2e-5
#: Seconds in which an error of one rank is one of all. The ranks' own limit is 60.
SOON = 10.0


def named(shards):
    return f"longspan_{shards}"


def logits(model, **given):
    out = model(use_cache=False, **given)
    return out.logits if "logits" in out else out.last_hidden_state


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@functools.cache
def small():
    model = mistral()
    model.config.sliding_window = WINDOW
    return model


def ids():
    return tokens(1, TOKENS)


@functools.cache
def one_process(case):
    """Logits, loss and gradients of the whole sequence."""
    model = small()
    model.zero_grad()
    given = {"input_ids": ids()}
    labels = ids().roll(-1, 1)
    labels[:, -1] = -100
    if case == "packed":
        given["position_ids"] = torch.cat([torch.arange(int(length)) for length in BOUNDS.diff()])[None]
        labels[:, BOUNDS[1:].long() - 1] = -100
    model.set_attn_implementation("longspan" if case == "pattern" else "eager")
    with patterned(model, case):
        out = logits(model, **given)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())
        loss.backward()
    return out.detach(), float(loss.detach()), gradients(model)


@contextlib.contextmanager
def patterned(model, case):
    if case != "pattern":
        yield
        return
    longspan.transformers.set_pattern(model, PATTERN)
    yield
    longspan.transformers.set_pattern(model, None)


def check_equal(case, kind):
    """Logits and gradients of all ranks are those of one process."""
    expected, expected_loss, expected_gradients = one_process(case)
    model, shards = small(), Shards(TOKENS, shards=kind)
    given = {"input_ids": shards.shard(ids()), "position_ids": shards.positions[None]}
    labels = shards.next_tokens(ids(), cu_seqlens=BOUNDS if case == "packed" else None)
    if case == "packed":
        starts = BOUNDS[torch.searchsorted(BOUNDS, shards.positions, right=True) - 1]
        given |= {"position_ids": (shards.positions - starts)[None], **PACKING}
    model.zero_grad()
    model.set_attn_implementation(named(kind))
    if case == "checkpointed":
        model.train()
        model.gradient_checkpointing_enable()
    with patterned(model, case):
        out = logits(model, **given)
        loss = ring_loss(out, labels)
        loss.backward()
        sum_gradients(model)
    model.gradient_checkpointing_disable()
    model.eval()
    assert apart(shards.gather(out), expected) < TOLERANCE, (case, kind)
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert abs(float(total) - expected_loss) < TOLERANCE * expected_loss, (case, kind)
    found = gradients(model)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        assert apart(gradient, expected_gradients[name]) < TOLERANCE, (case, kind, name)


def all_equal():
    cases = [("plain", kind) for kind in SHARDS]
    cases += [("packed", "zigzag"), ("pattern", "striped"), ("pattern", "contiguous"), ("checkpointed", "zigzag")]
    for case, kind in cases:
        check_equal(case, kind)
    return len(cases)


def check_refused(wrong, message, call):
    """``call(is_wrong)`` is an error on all ranks, soon: by name on those that are wrong, and all can go on."""
    rank, start = dist.get_rank(), time.monotonic()
    try:
        call(rank in wrong)
    except RingError as error:
        assert rank not in wrong and "raised an error before the call" in str(error), f"rank {rank}: {error}"
        assert re.search(rf"ranks? {', '.join(map(str, wrong))} raised", str(error)), error
    except Exception as error:
        assert rank in wrong and re.search(message, str(error)), f"rank {rank}: {error}"
    else:
        raise AssertionError(f"rank {rank}: no error about {message}")
    assert time.monotonic() - start < SOON, message


def all_refused():
    """Mistakes of all ranks, and of some."""
    model, shards = small(), Shards(TOKENS, shards="contiguous")
    right = {"input_ids": shards.shard(ids()), "position_ids": shards.positions[None], "use_cache": False}
    held = right["input_ids"].shape[1]
    zeros = torch.ones(1, held, dtype=torch.int64)
    zeros[0, 0] = 0
    own, short = torch.arange(held)[None], torch.tensor([0, 9], dtype=torch.int32)
    pooled = transformers.MistralForSequenceClassification(model.config)
    longrope = mistral()
    longrope.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    longrope.set_attn_implementation(named("contiguous"))

    def calling(model=model, run=None, **changed):
        run = run or model.__call__
        return lambda is_wrong: run(**right | changed) if is_wrong else small()(**right)

    cases = [
        ("position_ids are missing", calling(position_ids=None)),
        (r"position_ids\[:, 5\] is \[7\]", calling(position_ids=torch.where(own == 5, 7, right["position_ids"]))),
        # An error of transformers' own.
        ("number of sizes provided", calling(position_ids=right["position_ids"].expand(3, 1, held))),
        ("a KV cache", calling(use_cache=True)),
        ("a KV cache", calling(use_cache=None)),
        ("a KV cache", calling(past_key_values=transformers.DynamicCache())),
        ("a KV cache", calling(run=model.forward, use_cache=True)),
        ("generate, whose", calling(run=model.generate, max_new_tokens=2)),
        ("attention_mask has zeros", calling(attention_mask=zeros)),
        ("labels, which", calling(labels=right["input_ids"])),
        ("cu_seq_lens_q goes from 0 to 9", calling(**dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), short))),
        ("pools tokens", calling(pooled)),
        ("rope_type 'longrope'", calling(longrope)),
    ]
    model.set_attn_implementation(named("contiguous"))
    for message, call in cases:
        for wrong in ([0, 1, 2], [1]):
            check_refused(wrong, message, call)
    # What transformers would count where they are missing is right on rank 0 alone.
    check_refused([1, 2], r"position_ids\[:, 0\] is \[0\] on rank", lambda _: model(**right | {"position_ids": own}))
    # All ones are no padding, and the group is of use.
    expected = one_process("plain")[0]
    model.set_attn_implementation(named("contiguous"))
    with torch.no_grad():
        out = model(**right, attention_mask=torch.ones_like(zeros)).logits
    assert apart(out, shards.shard(expected)) < TOLERANCE
    return 2 * len(cases) + 1


def check_family(family, kind):
    model = made(family)
    given = tokens(2, 67)
    model.set_attn_implementation("eager")
    model.zero_grad()
    expected = logits(model, input_ids=given)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * weights).sum().backward()
    expected_gradients = gradients(model)
    shards = Shards(67, shards=kind)
    model.set_attn_implementation(named(kind))
    model.zero_grad()
    out = logits(model, input_ids=shards.shard(given), position_ids=shards.positions[None])
    (out * shards.shard(weights)).sum().backward()
    sum_gradients(model)
    assert apart(out.detach(), shards.shard(expected.detach())) < TOLERANCE, family.title
    found = gradients(model)
    # Experts that no token of any rank has chosen have none.
    assert found.keys() == expected_gradients.keys(), family.title
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in found.items():
        if float(expected_gradients[name].abs().max()) > 1e-5 * largest:
            assert apart(gradient, expected_gradients[name]) < TOLERANCE, (family.title, name)


#: Softcap, sinks, learned positions, experts, no positions, both ways; and some that are refused.
#: LONGSPAN_FAMILIES=all takes them all.
SOME = ("Gemma 2", "gpt-oss", "GPT-2", "Mixtral", "Cohere 2", "EmbeddingGemma", "BERT", "LFM2", "Llama 4")


def all_families():
    """Those that are named are equal to one process, others are refused."""
    seen, every = set(), os.environ.get("LONGSPAN_FAMILIES") == "all"
    for index, family in enumerate(FAMILIES.values()):
        if family.kind in ("vision", "encoder-decoder") or not (every or family.title in SOME):
            continue
        kind = SHARDS[index % 3]
        kind_of_model = made(family).config.model_type
        if kind_of_model in _families.FAMILIES:
            seen.add(kind_of_model)
            check_family(family, kind)
            continue
        made(family).set_attn_implementation(named(kind))
        given = {"input_ids": tokens(1, 9), "position_ids": torch.arange(9)[None]}
        check_refused([0, 1, 2], f"model_type '{kind_of_model}'", lambda _, given=given: made(family)(**given))
    assert not every or seen == _families.FAMILIES, seen ^ _families.FAMILIES
    return len(seen)


def guide():
    """The block of the guide that is given, in the group that there is."""
    dist.init_process_group = lambda backend: None
    destroy, dist.destroy_process_group = dist.destroy_process_group, dist.barrier
    runpy.run_path(sys.argv[1])
    dist.destroy_process_group = destroy
    return 1


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    longspan.transformers.register()
    for kind in SHARDS:
        longspan.transformers.register(named(kind), group=dist.group.WORLD, shards=kind)
    assert VOCABULARY == small().config.vocab_size
    runs = {"equal": all_equal, "refused": all_refused, "families": all_families, "guide": guide}
    for what, run in runs.items():
        start = time.monotonic()
        count = run()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{count} {what} on {dist.get_world_size()} ranks, {time.monotonic() - start:.0f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
