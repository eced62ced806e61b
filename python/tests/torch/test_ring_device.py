"""Rings over an engine for devices, around real processes that the real ``torchrun`` starts.

Ranks run ``ring_device.py``, by an engine that computes on the CPU. Everything here is under a time limit: a hang
is a failure.
"""

import json
import re
import sys

import pytest
import torch.distributed as dist
from test_ring import HERE, LIMIT, PATIENCE, Launch

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_available(), reason="needs torchrun and Gloo"
)


@pytest.fixture(scope="module")
def equal(tmp_path_factory):
    """What ranks write among 2, 3 and 4 of them, then among all 6, in one launch."""
    folder = tmp_path_factory.mktemp("equal")
    with Launch(folder, 6, HERE / "ring_device.py", "equal", folder, 2, 3, 4) as started:
        status, output = started.wait(5 * LIMIT)
    assert status == 0, output
    return output


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equal_to_one_process_and_to_rings_on_the_cpu(equal, ranks):
    assert equal.count(f"36 cases on {ranks} ranks by an engine for devices") == ranks, equal


def test_rounding_once_per_hop(equal):
    assert "errors of a ring over those of one process" in equal


def test_trees_and_groups_without_gloo(equal):
    assert "trees on 6 ranks" in equal


#: How a rank fails, in which stage, at which hop of it, and which rank. 3 ranks.
FAULTS = [
    ("kill", "make", 3, 2),
    ("kill", "forward", 1, 0),
    ("kill", "backward", 1, 2),
    ("stop", "forward", 1, 0),
    ("stop", "backward", 2, 1),
    ("delay", "backward", 0, 1),
    ("shape", "agree", 0, 1),
    ("pattern", "agree", 1, 2),
    ("interrupt now", "forward", 1, 0),
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """The folder of each fault; and all that was written."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "faults.json").write_text(json.dumps(FAULTS))
    folders = [folder / str(number) for number in range(len(FAULTS))]
    for each in folders:
        each.mkdir()
    with Launch(folder, 3, HERE / "ring_device.py", "faults", folder, PATIENCE) as started:
        status, output = started.wait(LIMIT + 10 * len(FAULTS))
    assert status == 0, output
    return folders, output


@pytest.mark.parametrize(
    "number", range(len(FAULTS)), ids=["-".join(map(str, fault)) for fault in FAULTS]
)
def test_ranks_that_fail(faults, number):
    how, _, _, victim = FAULTS[number]
    folder, output = max(faults[0][number].iterdir()), faults[1]

    def read(name):
        return json.loads((folder / f"{name}.json").read_text())

    statuses = {rank: read(f"status-{rank}")["status"] for rank in range(3)}
    ended = -9 if how in ("kill", "stop") else 0
    assert statuses == {rank: ended if rank == victim else 0 for rank in range(3)}, output
    fault = read("fault")
    reports = {rank: read(f"report-{rank}") for rank in range(3) if rank != victim or ended == 0}
    for rank, report in reports.items():
        interrupted = how == "interrupt now" and rank == victim
        assert report["type"] == ("KeyboardInterrupt" if interrupted else "RingError"), reports
        if rank != victim or how != "delay":
            assert report["time"] - fault["time"] < PATIENCE + 2, (rank, reports, fault)
    named = rf"rank {victim}\b|ranks \[[\d, ]*{victim}"
    said = [report["message"] for rank, report in reports.items() if rank != victim]
    assert all(re.search(named, message) for message in said), reports
