"""Shared by all tests."""

import importlib.util
import signal

import numpy
import pytest


def installed(name):
    """Whether there is such a package; a folder of tests by that name is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


# Those of `flex` want a process of their own, for Triton's interpreter: `pytest python/tests/flex`.
collect_ignore = ["flex"] if installed("torch") else ["flex", "torch"]
if "torch" in collect_ignore or not installed("transformers"):
    collect_ignore.append("transformers")
if not installed("jax"):
    collect_ignore.append("jax")

# A process that is started in the background ignores Ctrl-C, and so would the processes of tests about it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def rng(request):
    """Random numbers that depend on the test alone."""
    return numpy.random.default_rng(sum(request.node.nodeid.encode()))
