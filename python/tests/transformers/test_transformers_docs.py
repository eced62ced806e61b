"""The examples of docstrings and of the README run."""

import doctest
import pathlib
import re

import pytest

import longspan.transformers


@pytest.mark.parametrize(
    "item", [longspan.transformers, longspan.transformers.register, longspan.transformers.set_pattern]
)
def test_docstring(item):
    assert ">>>" in item.__doc__
    example = doctest.DocTestParser().get_doctest(item.__doc__, {}, item.__name__, None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(example)
    assert runner.failures == 0


def test_readme():
    readme = pathlib.Path(__file__).parents[2] / "README.md"
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    blocks = [block for block in blocks if "longspan.transformers" in block]
    assert blocks
    for block in blocks:
        exec(block, {})
