"""Kernels over Longspan's masks fit into the GPUs that they are generated for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_device import GPUS

#: Bytes of local memory of a thread: what doesn't fit into its 255 registers.
STACK = {"forward": 64, "backward": 512}

#: Where tiles that torch chose are too large for any mask: with `k <= q` alone, its numbers constants of
#: the kernel, these have 184, 592 and 1456 bytes (triton 3.9.0); the mask of here adds at most 40.
#: By compute capability, head dim and kind.
LARGE_TILES = {
    ("10.0", 64, "forward"): 184 + 40,
    ("8.0", 128, "backward"): 592 + 40,
    ("10.0", 128, "backward"): 1456 + 40,
}

CASES = [
    (f"{major}.{minor}", dim, kind)
    for major, minor in GPUS
    for dim in (64, 128)
    for kind in ("forward", "backward")
]


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """By compute capability, head dim and kind."""
    folder = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    # Triton either compiles or interprets.
    del environment["TRITON_INTERPRET"]
    program = Path(__file__).with_name("ahead.py")
    capabilities = ",".join(f"{major}.{minor}" for major, minor in GPUS)
    command = [sys.executable, str(program), capabilities, "64,128"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    return {(x["capability"], x["dim"], x["kind"]): x for x in found}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_fit(figures, case):
    capability, _, kind = case
    found = figures[case]
    assert found["shared"] <= GPUS[tuple(map(int, capability.split(".")))].shared_memory, found
    assert found["stack"] <= LARGE_TILES.get(case, STACK[kind]), found
