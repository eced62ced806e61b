"""A ring of three processes by the code for CUDA devices, kernels interpreted. ``LONGSPAN_FLEX=all`` runs all cases."""

import os
import pathlib
import re
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import torch.distributed as dist
from launching import launched

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_available(), reason="needs torchrun and Gloo"
)

HERE = pathlib.Path(__file__).parent
CASES = ["window", "global", "longnet"] if os.environ.get("LONGSPAN_FLEX") == "all" else ["window"]


def test_ring_by_interpreted_kernels():
    output = launched(3, HERE / "ring_interpreted.py", *CASES, limit=1200)
    for case in CASES:
        received = re.findall(rf"{case}: rank \d received (\d+) of (\d+) bytes", output)
        assert len(received) == 3 and all(got == needed for got, needed in received), output
