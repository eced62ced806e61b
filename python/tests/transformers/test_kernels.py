"""The directory for Hugging Face's ``kernels``, as its local override loads it."""

import itertools
import pathlib
import re
import sys

import oracle
import pytest
import torch
from tiny import MODELS, TOLERANCE, apart, padding, tokens, with_attention

kernels = pytest.importorskip("kernels")

DIRECTORY = pathlib.Path(__file__).parents[3] / "integrations" / "kernels"
NAME = "longspan/attention"

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "torch"))
import dense  # noqa: E402


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}={DIRECTORY}")
    return kernels.get_kernel(NAME, version=1)


def heads_first(*tensors):
    return (x.transpose(1, 2) for x in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (9, 0), (5, 3)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_func(rng, kernel, causal, window, dtype):
    q, k, v, dout = dense.tensors(rng, (2, 4, 2, 60, 97, 16, 16), dtype)
    out, lse, probabilities = kernel.flash_attn_func(
        *heads_first(q, k, v), causal=causal, window_size=window, softmax_scale=0.3, return_attn_probs=True
    )
    assert probabilities is None
    gradients = torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2))
    left, right = window[0], 0 if causal else window[1]
    mask = oracle.mask(lambda i, j: (left < 0 or i - j <= left) and (right < 0 or j - i <= right), 60, 97)
    expected = dense.truth(q, k, v, mask, dout, scale=0.3)
    found = dict(zip(("dq", "dk", "dv"), gradients), out=out.transpose(1, 2), lse=lse)
    dense.check(found, expected, dtype)


def test_flash_attn_varlen_func(rng, kernel):
    bounds = torch.tensor([0, 20, 21, 90], dtype=torch.int32)
    q, k, v = (torch.from_numpy(rng.standard_normal((90, heads, 16), dtype="float32")) for heads in (4, 2, 2))
    q.requires_grad_()
    out, lse, _ = kernel.flash_attn_varlen_func(
        q, k, v, bounds, bounds, 69, 69, causal=True, window_size=(7, 0), return_attn_probs=True
    )
    (gradient,) = torch.autograd.grad(out.square().sum(), q)
    assert lse.shape == (4, 90)
    for first, end in itertools.pairwise(bounds.tolist()):
        own = [x[first:end].detach().requires_grad_() for x in (q, k, v)]
        one = kernel.flash_attn_func(*(x[None] for x in own), causal=True, window_size=(7, 0))[0]
        torch.testing.assert_close(out[first:end], one, rtol=1e-5, atol=2e-6)
        expected = torch.autograd.grad(one.square().sum(), own[0])[0]
        torch.testing.assert_close(gradient[first:end], expected, rtol=1e-5, atol=1e-5)


def test_refusals(kernel):
    q, bounds = torch.ones(10, 2, 8), torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="block_table: expected None"):
        kernel.flash_attn_varlen_func(q, q, q, bounds, bounds, 10, 10, block_table=bounds)
    with pytest.raises(ValueError, match="max_seqlen_k is 9, but a sequence has 10"):
        kernel.flash_attn_varlen_func(q, q, q, bounds, bounds, 10, 9)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_models(kernel, name):
    """Padding, windows and gradients of models, with transformers' own flash attention around the kernel."""
    model = MODELS[name]()
    ids, mask = tokens(3), padding("right", [67, 41, 3])

    def run(model):
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=mask).logits
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        ((losses * mask).sum() / mask.sum()).backward()
        return logits.detach()[mask.bool()], {n: w.grad.clone() for n, w in model.named_parameters()}

    expected, expected_gradients = with_attention(model, "eager", run)
    model.set_attn_implementation(NAME, allow_all_kernels=True)
    got, gradients = run(model)
    assert apart(got, expected) < TOLERANCE
    for weight, gradient in gradients.items():
        assert apart(gradient, expected_gradients[weight]) < TOLERANCE, weight


def test_guide(monkeypatch):
    """The guide's example, from the root of the sources."""
    root = DIRECTORY.parents[1]
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs" / "hosts.md").read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "from kernels" in block)
    monkeypatch.chdir(root)
    monkeypatch.setenv("LOCAL_KERNELS", "")
    exec(block, {})
