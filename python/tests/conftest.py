"""Shared by all tests."""

import importlib.util

import numpy
import pytest


def installed(name):
    """Whether there is such a package; a folder of tests by that name is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


collect_ignore = [] if installed("torch") else ["torch"]
if collect_ignore or not installed("transformers"):
    collect_ignore.append("transformers")


@pytest.fixture
def rng(request):
    """Random numbers that depend on the test alone."""
    return numpy.random.default_rng(sum(request.node.nodeid.encode()))
