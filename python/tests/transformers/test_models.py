"""Models give what they give with eager attention: outputs, gradients, and a course of training."""

import pytest
import torch
from tiny import MODELS, TOKENS, TOLERANCE, apart, padding, tokens, with_attention

import longspan.transformers._attention

LENGTHS = [TOKENS, 41, 3]


def inputs(side, batch=len(LENGTHS)):
    """A batch, and where it has tokens."""
    ids = tokens(batch)
    if side == "none":
        return {"input_ids": ids}, torch.ones_like(ids)
    mask = padding(side, LENGTHS)
    # Padded on both sides: the middle of a row.
    if side == "both":
        mask = padding("left", LENGTHS) * padding("right", [60, 60, 66])
        mask[2] = padding("left", LENGTHS)[2]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids * mask, "attention_mask": mask, "position_ids": positions}, mask


def loss_of(logits, ids, mask):
    """Of the tokens alone: rows of padding are not compared."""
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    return (losses * mask).sum() / mask.sum()


def run(model, side):
    given, mask = inputs(side)
    if "modernbert" in model.config.model_type:
        given.pop("position_ids", None)
    model.zero_grad()
    logits = model(**given).logits
    loss_of(logits, given["input_ids"], mask).backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return logits.detach()[mask.bool()], gradients


@pytest.mark.parametrize("side", ["none", "left", "right", "both"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name, side):
    model = MODELS[name]()
    expected, expected_gradients = with_attention(model, "eager", lambda m: run(m, side))
    got, gradients = with_attention(model, "longspan", lambda m: run(m, side))
    assert apart(got, expected) < TOLERANCE
    for weight, gradient in gradients.items():
        assert apart(gradient, expected_gradients[weight]) < TOLERANCE, weight


@pytest.mark.parametrize(
    "name, dropped",
    [
        ("gemma2", "softcap"),
        ("gemma2", "scale"),
        ("mistral", "window"),
        ("gemma2", "window"),
        ("modernbert", "window"),
        ("llama", "key_padding"),
        ("modernbert", "key_padding"),
    ],
)
def test_what_is_dropped_is_seen(monkeypatch, name, dropped):
    """The comparison above would fail if a layer ignored something."""
    model = MODELS[name]()
    expected, _ = with_attention(model, "eager", lambda m: run(m, "left"))
    real = longspan.transformers._attention.over_pattern

    def forgetful(q, k, v, pattern, **options):
        if dropped == "window":
            pattern = "causal" if "causal" in pattern else "full"
        else:
            options[dropped] = None
        return real(q, k, v, pattern, **options)

    monkeypatch.setattr(longspan.transformers._attention, "over_pattern", forgetful)
    got, _ = with_attention(model, "longspan", lambda m: run(m, "left"))
    assert apart(got, expected) > 100 * TOLERANCE


@pytest.mark.parametrize("wider", [-1, 1])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "modernbert"])
def test_window_off_by_one_is_seen(monkeypatch, name, wider):
    model = MODELS[name]()
    expected, _ = with_attention(model, "eager", lambda m: run(m, "none"))
    real = longspan.transformers._attention.over_pattern

    def wrong(q, k, v, pattern, **options):
        return real(q, k, v, _widened(pattern, wider), **options)

    monkeypatch.setattr(longspan.transformers._attention, "over_pattern", wrong)
    got, _ = with_attention(model, "longspan", lambda m: run(m, "none"))
    assert apart(got, expected) > 100 * TOLERANCE


def _widened(pattern, wider):
    for width in (6, 7):
        pattern = pattern.replace(f"window({width},", f"window({width + wider},")
    return pattern


@pytest.mark.parametrize("rows", ["alike", "different"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_sequences(name, rows):
    """Sequences side by side, told apart by positions that begin anew."""
    lengths = [[29, 1, 37], [29, 1, 37]] if rows == "alike" else [[29, 1, 37], [2, 60, 5]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    given = {"input_ids": tokens(2), "position_ids": positions, "use_cache": False}
    model = MODELS[name]()
    expected = with_attention(model, "eager", lambda m: m(**given).logits.detach())
    got = with_attention(model, "longspan", lambda m: m(**given).logits.detach())
    assert apart(got, expected) < TOLERANCE
    alone = model(input_ids=given["input_ids"][:1, 30:], use_cache=False).logits.detach()
    if rows == "alike":
        assert apart(got[:1, 30:], alone) < TOLERANCE


def test_checkpointing():
    """Layers that run again in the backward pass are handed the same mask."""
    model = MODELS["mistral"]()
    _, expected = with_attention(model, "eager", lambda m: run(m, "left"))
    model.gradient_checkpointing_enable()
    _, got = with_attention(model.train(), "longspan", lambda m: run(m, "left"))
    for weight, gradient in got.items():
        assert apart(gradient, expected[weight]) < TOLERANCE, weight


@pytest.mark.parametrize("name", MODELS)
def test_training(name):
    """Twenty steps on left-padded batches: the same loss at each."""

    def train(attention):
        model = MODELS[name]().train()
        model.set_attn_implementation(attention)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for step in range(20):
            given, mask = inputs("left")
            given.pop("position_ids")
            optimiser.zero_grad()
            loss = loss_of(model(**given).logits, given["input_ids"], mask)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            losses.append(float(loss.detach()))
        return torch.tensor(losses)

    expected, got = train("eager"), train("longspan")
    assert expected[-1] < 0.9 * expected[0], "nothing was learnt, so nothing is compared"
    # Steps build on steps, so that differences grow.
    assert apart(got, expected) < 50 * TOLERANCE


def test_half_types():
    """bf16 weights: within what bf16 itself leaves uncertain, seen from f32."""
    model = MODELS["llama"]()
    given = {"input_ids": tokens(2)}
    exact = with_attention(model, "eager", lambda m: m(**given).logits.detach())
    model = model.to(torch.bfloat16)
    eager = with_attention(model, "eager", lambda m: m(**given).logits.detach().float())
    got = with_attention(model, "longspan", lambda m: m(**given).logits.detach())
    assert got.dtype == torch.bfloat16
    # Both round to bf16 after each layer, at other places.
    assert apart(got.float(), exact) < 2 * apart(eager, exact)


@pytest.mark.parametrize("name", ["llama", "modernbert"])
def test_compiled(name):
    """One graph, padding and all, holes in it too."""
    torch._dynamo.reset()
    model = MODELS[name]()
    ids, held = tokens(len(LENGTHS)), padding("left", LENGTHS)
    expected = with_attention(
        model, "eager", lambda m: m(input_ids=ids, attention_mask=held).logits.detach()
    )
    model.set_attn_implementation("longspan")
    # Without a C++ compiler.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = compiled(input_ids=ids, attention_mask=held).logits.detach()
    assert apart(got[held.bool()], expected[held.bool()]) < TOLERANCE
    held[0, 5:9] = 0
    expected = with_attention(
        model, "eager", lambda m: m(input_ids=ids, attention_mask=held).logits.detach()
    )
    model.set_attn_implementation("longspan")
    for run in (compiled, model):
        got = run(input_ids=ids, attention_mask=held).logits.detach()
        assert apart(got[held.bool()], expected[held.bool()]) < TOLERANCE
