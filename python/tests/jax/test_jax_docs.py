"""The examples of the documentation."""

import doctest
import pathlib
import re

import pytest

import longspan.jax
from longspan.jax import _attention, _compat


@pytest.mark.parametrize("module", [longspan.jax, _attention, _compat], ids=lambda module: module.__name__)
def test_examples(module):
    if module is _compat:
        pytest.importorskip("flax")
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


@pytest.mark.parametrize("file", ["docs/hosts.md", "python/README.md"])
def test_guide(file):
    guide = pathlib.Path(__file__).parents[3] / file
    blocks = [x for x in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL) if "import jax" in x]
    assert blocks
    for block in blocks:
        if "flax" in block:
            pytest.importorskip("flax")
        exec(block, {})
