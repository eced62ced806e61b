"""Dropout on attention weights: what is dropped, that it is reproducible, and that models train with it as they do
with eager attention."""

import pytest
import torch
import transformers
from families import FAMILIES, default_config_of
from tiny import TOLERANCE, apart, tokens
from transformers import masking_utils

from longspan.transformers import _support
from longspan.transformers._attention import attention
from longspan.transformers._mask import mask

#: Families whose default configurations have dropout on attention weights.
TITLES = ("BERT", "DistilBERT", "ELECTRA", "GPT-2", "GPTBigCode", "RoBERTa", "XLM-RoBERTa")
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")


def made(title):
    """A small model that trains, with the dropout that its config has by default, on attention weights alone."""
    family = FAMILIES[title]
    torch.manual_seed(11)
    model = getattr(transformers, family.model)._from_config(default_config_of(family), attn_implementation="longspan")
    for module in model.modules():
        # Layers hand over the probability of one of their own modules, which they don't call.
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, args, out: args[0])
    return model.train()


def step(model, seed=3):
    """Logits and gradients of a pass."""
    torch.manual_seed(seed)
    model.zero_grad()
    out = model(input_ids=tokens(2, 23)).logits
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
    return [out.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("title", TITLES)
def test_seeds(title):
    model = made(title)
    first, again, other = step(model), step(model), step(model, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert apart(first[0], other[0]) > 100 * TOLERANCE


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("title", ["BERT", "GPT-2", "RoBERTa"])
def test_gradient_checkpointing(title, reentrant):
    model = made(title)
    expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    passes = []
    layers = [module for module in model.modules() if _support.calls_interface(type(module))]
    for layer in layers:
        layer.register_forward_hook(lambda *_: passes.append(1))
    got = step(model)
    assert len(passes) == 2 * len(layers) > 0, "layers run again in the backward pass"
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        assert apart(a, b) < TOLERANCE


def test_compiled():
    """Each run of a graph draws other weights, and ``manual_seed`` the same ones."""
    torch._dynamo.reset()
    model = torch.compile(made("GPT-2"), fullgraph=True, backend="aot_eager")
    given = {"input_ids": tokens(2, 23), "attention_mask": torch.ones((2, 23), dtype=torch.int64), "use_cache": False}
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append(model(**given).logits.detach())
    assert torch.equal(outs[0], outs[1])
    assert apart(outs[0], outs[2]) > 100 * TOLERANCE


@pytest.mark.parametrize("title", TITLES)
def test_evaluation(title):
    """Without dropout, as eager attention."""
    model = made(title).requires_grad_(False)
    got, again = (model.eval()(input_ids=tokens(2, 23)).logits for _ in range(2))
    model.set_attn_implementation("eager")
    assert torch.equal(got, again)
    assert apart(got, model(input_ids=tokens(2, 23)).logits) < TOLERANCE


def test_rate():
    """Equal weights, and values that show them: a share of 0.3 is 0, the others are 1 / 0.7 as large."""
    count, p = 64, 0.3
    layer = torch.nn.Module()
    whole = mask(2, count, count, mask_function=masking_utils.bidirectional_mask_function)
    zeros, values = torch.zeros((2, 4, count, count)), torch.eye(count).expand(2, 4, -1, -1)
    torch.manual_seed(3)
    weights = attention(layer, zeros, zeros, values, whole, dropout=p)[0] * count
    dropped = weights == 0
    torch.testing.assert_close(weights[~dropped], torch.tensor(1 / (1 - p)).expand(int((~dropped).sum())))
    # Four standard errors.
    assert abs(dropped.float().mean() - p) < 4 * (p * (1 - p) / weights.numel()) ** 0.5
    torch.testing.assert_close(attention(layer.eval(), zeros, zeros, values, whole, dropout=p)[0] * count, weights**0)


def test_packed_rows():
    """Rows with sequences of their own lengths are computed one by one, each with a seed of its own."""
    ids = torch.tensor([[0] * 8 + [1] * 8, [0] * 6 + [1] * 10])
    function = masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(ids)
    )
    packed = mask(2, 16, 16, mask_function=function)
    zeros, values = torch.zeros((2, 1, 16, 16)), torch.eye(16).expand(2, 1, -1, -1)
    dropped = attention(torch.nn.Module(), zeros, zeros, values, packed, dropout=0.5)[0] == 0
    shared = torch.arange(6)[:, None] >= torch.arange(6)
    assert not torch.equal(dropped[0, :6, 0, :6][shared], dropped[1, :6, 0, :6][shared])


#: Tokens of the toy task, per row, rows, and steps.
WORDS, LENGTH, ROWS, STEPS = 8, 16, 16, 200


def small(kind, name):
    sizes = {"vocab_size": WORDS, "initializer_range": 0.1, "attn_implementation": name}
    if kind == "BERT":
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **sizes
        )
        return transformers.BertForMaskedLM(config)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None, **sizes)
    return transformers.GPT2LMHeadModel(config)


def losses(kind, name, seed):
    """Of training with the default dropouts, 0.1 each: every position says which token is the first of its row."""
    torch.manual_seed(seed)
    model = small(kind, name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(seed)
    curve = []
    for _ in range(STEPS):
        ids = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids[:, :1].repeat(1, LENGTH)).loss
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return torch.tensor(curve)


def statistics(kind, name):
    """The mean of a loss curve, and that of its second half, per seed. A seed has the same weights at the beginning and
    the same tokens with either attention, so that what differs is which weights are dropped."""
    curves = torch.stack([losses(kind, name, seed) for seed in range(3)])
    assert (curves[:, -20:].mean(1) < 0.2 * curves[:, :20].mean(1)).all(), "the task is learned"
    return torch.stack((curves.mean(1), curves[:, STEPS // 2 :].mean(1)))


@pytest.mark.parametrize("kind", ["BERT", "GPT-2"])
def test_training(kind):
    """Loss curves are those of eager attention: means over three seeds within two standard errors."""
    theirs, ours = statistics(kind, "eager"), statistics(kind, "longspan")
    errors = ((theirs.var(1) + ours.var(1)) / 3).sqrt()
    distances = (ours.mean(1) - theirs.mean(1)).abs() / errors
    print(kind, theirs.mean(1).tolist(), ours.mean(1).tolist(), errors.tolist(), distances.tolist())
    assert (distances < 2).all(), distances
