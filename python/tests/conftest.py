"""Shared by all tests."""

import numpy
import pytest


@pytest.fixture
def rng(request):
    """Random numbers that depend on the test alone."""
    return numpy.random.default_rng(sum(request.node.nodeid.encode()))
