"""The examples of docstrings and of the README run."""

import doctest
import inspect
import pathlib
import re

import pytest

import longspan


def documented():
    yield "longspan", longspan.__doc__
    for name in longspan.__all__:
        item = getattr(longspan, name)
        if name.startswith("__"):
            continue
        yield name, item.__doc__
        if inspect.isclass(item):
            for method, value in vars(item).items():
                if not method.startswith("_") and callable(value):
                    yield f"{name}.{method}", value.__doc__


@pytest.mark.parametrize("name, text", list(documented()))
def test_docstring(name, text):
    assert text, f"{name} has no docstring"
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(example)
    assert runner.failures == 0


@pytest.mark.parametrize("name", [name for name in longspan.__all__ if not name.startswith("__")])
def test_functions_have_examples(name):
    item = getattr(longspan, name)
    if inspect.isbuiltin(item):
        assert ">>>" in item.__doc__
        assert inspect.signature(item)


@pytest.mark.parametrize("file", ["python/README.md", "README.md", "docs/adaptive.md", "docs/cookbook.md", "docs/decoding.md"])
def test_readme(file):
    readme = pathlib.Path(__file__).parents[2] / file
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    # Those of hosts run in their own folders of tests.
    hosts = ("import torch", "import jax", "longspan.transformers")
    blocks = [block for block in blocks if not any(host in block for host in hosts)]
    assert blocks
    for block in blocks:
        exec(block, {})


def test_stubs_name_everything():
    stub = pathlib.Path(longspan.__file__).with_name("_longspan.pyi").read_text()
    for name in longspan.__all__:
        assert re.search(rf"(def|class) {name}\b|^{name}:", stub, re.MULTILINE) or name in (
            "Attention",
            "Output",
            "Gradients",
        )
