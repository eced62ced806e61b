"""A user pattern gives what eager attention gives with the same pairs as a 4-D additive mask."""

import copy
import functools
import io
import itertools

import pytest
import torch
import transformers
from families import FAMILIES, made
from tiny import MODELS, TOLERANCE, WINDOW, apart, padding, tokens, with_attention

import longspan
import longspan.transformers

TOKENS = 29
HEADS = 4
#: Reaches back past every window and every cache that slides, and skips near keys.
SPARSE = "window(3, 2) | sinks(2) | strided(11)"
BY_HEAD = f"heads([{SPARSE}, strided(3), full, window(12, 1)])"
LOWEST = torch.finfo(torch.float32).min


_NUMBERS = itertools.count()


@pytest.fixture
def name():
    """A name of its own for each test: registered patterns stay."""
    return f"longspan_{next(_NUMBERS)}"


@functools.lru_cache
def allowed(text, count):
    """The pairs of a pattern, one by one, ``(heads, queries, keys)``."""
    pattern = longspan.Pattern(text)
    heads = range(HEADS) if pattern.heads else [None]
    return torch.tensor(
        [[[pattern.allows(q, k, head=head) for k in range(count)] for q in range(count)] for head in heads]
    )


def additive(text, held, causal=True, window=None):
    """The mask of a model's layer with a pattern, ``(batch, heads, queries, keys)`` of 0 and the lowest number."""
    count = held.shape[1]
    q, k = torch.arange(count)[:, None], torch.arange(count)[None, :]
    own = (k <= q) if causal else torch.ones((count, count), dtype=torch.bool)
    if window is not None:
        own = own & (q - k < window)
    pairs = (own if text is None else own & allowed(text, count)) & held.bool()[:, None, None, :]
    return torch.where(pairs, 0.0, LOWEST)


def masks_of(config, text, held, causal=True):
    """What eager attention takes: a mask, or one per layer type."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if not types:
        return additive(text, held, causal, window)
    windows = {"full_attention": None, "sliding_attention": window}
    return {kind: additive(text, held, causal, windows[kind]) for kind in types}


def run(model, held, ids, attention_mask):
    """Logits of rows that hold tokens, and gradients."""
    model.zero_grad()
    given = {"input_ids": ids, "attention_mask": attention_mask}
    if "bert" not in model.config.model_type:
        given["position_ids"] = (held.cumsum(1) - 1).clamp(min=0)
    logits = model(**given).logits[held.bool()]
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
    return logits.detach(), {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}


def cases():
    return [title for title, family in FAMILIES.items() if "pattern" in family.checks]


@pytest.mark.parametrize("text", [SPARSE, BY_HEAD], ids=["text", "heads"])
@pytest.mark.parametrize("title", cases())
def test_as_eager_with_a_4d_mask(title, text, name):
    family = FAMILIES[title]
    model, causal = made(family), family.kind == "decoder"
    held = padding("left", [TOKENS, 17], TOKENS)
    ids = tokens(2, TOKENS) * held
    if "ROBERTA" in title.upper():
        # Its positions follow the tokens that aren't padding.
        held = torch.ones_like(held)
    mask = masks_of(model.config, text, held, causal)
    expected, expected_gradients = with_attention(model, "eager", lambda m: run(m, held, ids, mask))
    longspan.transformers.register(name, text)
    got, gradients = with_attention(model, name, lambda m: run(m, held, ids, held))
    assert apart(got, expected) < TOLERANCE
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for weight, gradient in gradients.items():
        if float(expected_gradients[weight].abs().max()) > 1e-5 * largest:
            assert apart(gradient, expected_gradients[weight]) < TOLERANCE, weight
    without = with_attention(model, "longspan", lambda m: run(m, held, ids, held)[0])
    assert apart(without, expected) > 100 * TOLERANCE, "the pattern changes nothing, so nothing is compared"


def test_at_least_ten_families():
    assert len(cases()) >= 10


def per_layer(layer_idx, layer_type, config):
    """Another pattern for each layer."""
    assert layer_type is None or layer_type == config.layer_types[layer_idx]
    return [longspan.Pattern(SPARSE), None][layer_idx]


@pytest.mark.parametrize("title", ["Llama", "Gemma 2"])
@pytest.mark.parametrize("how", ["register", "set_pattern"])
def test_functions(title, how, name):
    """Eager attention is given the mask of each layer as the layer is called."""
    model = made(FAMILIES[title])
    held = padding("left", [TOKENS, 17], TOKENS)
    ids = tokens(2, TOKENS) * held
    windows = {None: None, "full_attention": None, "sliding_attention": WINDOW}
    hooks = []
    for index, layer in enumerate(model.model.layers):
        kind = (getattr(model.config, "layer_types", None) or [None, None])[index]
        mask = additive([SPARSE, None][index], held, window=windows[kind])
        change = lambda module, args, given, mask=mask: (args, {**given, "attention_mask": mask})
        hooks.append(layer.self_attn.register_forward_pre_hook(change, with_kwargs=True))
    expected, _ = with_attention(model, "eager", lambda m: run(m, held, ids, held))
    for hook in hooks:
        hook.remove()
    longspan.transformers.register(name, per_layer if how == "register" else "full")
    model.set_attn_implementation(name)
    if how == "set_pattern":
        longspan.transformers.set_pattern(model, per_layer)
    got, _ = run(model, held, ids, held)
    longspan.transformers.set_pattern(model, None)
    assert apart(got, expected) < TOLERANCE


PROMPT, NEW = 17, 14
CACHES = {
    "dynamic": lambda model: {},
    "dynamic, every key": lambda model: {"past_key_values": transformers.DynamicCache()},
    "static": lambda model: {"cache_implementation": "static"},
    "static, more slots": lambda model: {
        "past_key_values": transformers.StaticCache(config=model.config, max_cache_len=61)
    },
    "none": lambda model: {"use_cache": False},
    "chunked prefill": lambda model: {"prefill_chunk_size": 5},
}


@functools.lru_cache
def greedy(name, text):
    """Tokens of eager attention without a cache, with a 4-D mask for the whole sequence at each step."""
    model = MODELS[name]()
    held = padding("left", [PROMPT, 11, 2], PROMPT)
    ids = tokens(3, PROMPT) * held
    logits = []
    for _ in range(NEW):
        given = {"position_ids": (held.cumsum(1) - 1).clamp(min=0), "use_cache": False}
        mask = masks_of(model.config, text, held)
        with torch.no_grad():
            logits.append(model(input_ids=ids, attention_mask=mask, **given).logits[:, -1])
        ids = torch.cat((ids, logits[-1].argmax(-1, keepdim=True)), 1)
        held = torch.nn.functional.pad(held, (0, 1), value=1)
    return ids[:, PROMPT:], torch.stack(logits, 1)


@pytest.mark.parametrize("text", [SPARSE, BY_HEAD], ids=["text", "heads"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("model_name", ["llama", "mistral", "gemma2"])
def test_generate(model_name, cache, text, name):
    expected, expected_logits = greedy(model_name, text)
    model = MODELS[model_name]()
    longspan.transformers.register(name, text)
    model.set_attn_implementation(name)
    held = padding("left", [PROMPT, 11, 2], PROMPT)
    out = model.generate(
        input_ids=tokens(3, PROMPT) * held,
        attention_mask=held,
        **CACHES[cache](model),
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences[:, PROMPT:], expected)
    assert apart(torch.stack(out.logits, 1), expected_logits) < TOLERANCE
    if cache == "dynamic" and model_name != "llama":
        assert any(layer.is_sliding and layer.keys.shape[2] < WINDOW for layer in out.past_key_values.layers)


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=tokens(2, TOKENS), use_cache=False).logits


def expected_of(model, text):
    model = copy.deepcopy(model)
    longspan.transformers.set_pattern(model, None)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        held = torch.ones((2, TOKENS), dtype=torch.int64)
        return model(input_ids=tokens(2, TOKENS), attention_mask=masks_of(model.config, text, held)).logits


@pytest.mark.parametrize("how", ["register", "set_pattern"])
def test_two_models(how, name):
    """Models with different patterns in one process don't see each other's."""
    first, second, plain = (MODELS[each]() for each in ("llama", "llama", "mistral"))
    texts = [SPARSE, "strided(4) | window(1, 0)"]
    for number, (model, text) in enumerate(zip((first, second), texts)):
        if how == "register":
            longspan.transformers.register(f"{name}_{number}", text)
            model.set_attn_implementation(f"{name}_{number}")
        else:
            model.set_attn_implementation("longspan")
            longspan.transformers.set_pattern(model, text)
    plain.set_attn_implementation("longspan")
    for _ in range(2):
        assert apart(logits_of(first), expected_of(first, texts[0])) < TOLERANCE
        assert apart(logits_of(second), expected_of(second, texts[1])) < TOLERANCE
        assert apart(logits_of(plain), expected_of(plain, None)) < TOLERANCE
    assert apart(logits_of(first), logits_of(second)) > 100 * TOLERANCE


def test_pattern_of_an_instance_replaces_that_of_its_name(name):
    longspan.transformers.register(name, SPARSE)
    model = MODELS["llama"]()
    model.set_attn_implementation(name)
    longspan.transformers.set_pattern(model, "strided(4)")
    assert apart(logits_of(model), expected_of(model, "strided(4)")) < TOLERANCE
    longspan.transformers.set_pattern(model, None)
    assert apart(logits_of(model), expected_of(model, SPARSE)) < TOLERANCE


@pytest.mark.parametrize("pattern", [SPARSE, per_layer], ids=["text", "function"])
def test_copies_keep_the_pattern(pattern):
    model = MODELS["llama"]()
    model.set_attn_implementation("longspan")
    longspan.transformers.set_pattern(model, pattern)
    expected = logits_of(model)
    assert torch.equal(logits_of(copy.deepcopy(model)), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(logits_of(torch.load(file, weights_only=False)), expected)


def test_registered_again(name):
    """Another pattern takes the place of the one before, also where a function's results were kept."""
    model = MODELS["llama"]()
    longspan.transformers.register(name, lambda *layer: SPARSE)
    model.set_attn_implementation(name)
    assert apart(logits_of(model), expected_of(model, SPARSE)) < TOLERANCE
    longspan.transformers.register(name, lambda *layer: "strided(4)")
    assert apart(logits_of(model), expected_of(model, "strided(4)")) < TOLERANCE
    longspan.transformers.register(name, "full")
    assert apart(logits_of(model), expected_of(model, None)) < TOLERANCE


def test_packed_sequences(name):
    """The pattern counts within each sequence."""
    longspan.transformers.register(name, SPARSE)
    model = MODELS["llama"]()
    model.set_attn_implementation(name)
    lengths = [13, 1, 15]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = tokens(1, TOKENS)
    with torch.no_grad():
        got = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        model.set_attn_implementation("eager")
        expected = [
            model(input_ids=part, attention_mask=masks_of(model.config, SPARSE, torch.ones_like(part))).logits
            for part in ids.split(lengths, 1)
        ]
    assert apart(got, torch.cat(expected, 1)) < TOLERANCE


@pytest.mark.parametrize(
    "pattern, how",
    [(SPARSE, "register"), (per_layer, "register"), (BY_HEAD, "set_pattern")],
    ids=["text", "function", "heads"],
)
def test_compiled(pattern, how, name):
    torch._dynamo.reset()
    longspan.transformers.register(name, pattern)
    model = MODELS["llama"]()
    model.set_attn_implementation(name if how == "register" else "longspan")
    if how == "set_pattern":
        longspan.transformers.set_pattern(model, pattern)
    given = {"input_ids": tokens(2, TOKENS), "attention_mask": padding("left", [TOKENS, 17], TOKENS)}
    with torch.no_grad():
        expected = model(**given).logits
        # Without a C++ compiler.
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(**given).logits
    assert apart(got, expected) < TOLERANCE
    assert apart(logits_of(model), expected_of(model, None)) > 100 * TOLERANCE
