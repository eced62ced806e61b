"""The examples of docstrings and of the README run."""

import doctest
import pathlib
import re

import pytest

import longspan.torch

DOCUMENTED = [longspan.torch] + [getattr(longspan.torch, name) for name in longspan.torch.__all__]


@pytest.mark.parametrize("item", DOCUMENTED, ids=lambda item: item.__name__)
def test_docstring(item):
    assert ">>>" in item.__doc__
    example = doctest.DocTestParser().get_doctest(item.__doc__, {}, item.__name__, None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(example)
    assert runner.failures == 0


@pytest.mark.parametrize("file", ["python/README.md", "docs/cookbook.md", "docs/hosts.md", "docs/longnet.md"])
def test_readme(file):
    readme = pathlib.Path(__file__).parents[3] / file
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    # Those of rings run under torchrun, in test_ring.py and ring_modules.py, that of kernels beside transformers.
    others = ("ring_", "from kernels")
    blocks = [x for x in blocks if "import torch" in x and not any(name in x for name in others)]
    assert blocks
    for block in blocks:
        exec(block, {})
