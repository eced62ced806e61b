"""Tests of the FlexAttention engine: torch's CUDA kernels, run on CPU tensors in Triton's interpreter.

Triton decides for its interpreter when it is imported, so these tests want a process in which nothing
did so before: `pytest tests/flex`, or `pytest tests`, which collects this folder first.
"""

import os
import sys

import pytest

os.environ["TRITON_INTERPRET"] = "1"


def is_interpreted():
    """Whether Triton, if it is imported already, was imported for its interpreter."""
    if "triton.language.standard" not in sys.modules:
        return True
    return type(sys.modules["triton.language.standard"].sum).__name__ == "InterpretedFunction"


def pytest_collectstart(collector):
    if not is_interpreted():
        raise pytest.UsageError("Triton was imported without TRITON_INTERPRET=1: run tests/flex alone")
