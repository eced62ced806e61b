"""One sequence around real processes that the real ``torchrun`` starts.

Ranks run ``ring_ranks.py``, ``ring_dilated.py`` and ``ring_sinks.py``. Everything here is under a time limit: a hang is a failure.
"""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.torch import ring_attention, ring_positions

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_available(), reason="needs torchrun and Gloo"
)

HERE = pathlib.Path(__file__).parent
#: Seconds that a launch may take, starting torch in every process included.
LIMIT = 120
PATIENCE = 2.0


class Launch:
    """Ranks that torchrun has started, and what they write into a folder."""

    def __init__(self, folder, ranks, script, *arguments, beside=()):
        self.folder = folder
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [*beside, sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(script), *map(str, arguments)]
        self.output = folder / "output"
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                command, cwd=HERE, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def wait(self, limit=LIMIT):
        """The exit status, and all that was written."""
        status = self.process.wait(limit)
        return status, self.output.read_text()

    def read(self, name):
        """What a rank has reported, once it has."""
        end = time.monotonic() + LIMIT
        while not (self.folder / f"{name}.json").exists():
            assert time.monotonic() < end, f"no {name}:\n{self.output.read_text()}"
            assert self.process.poll() is None or (self.folder / f"{name}.json").exists(), (
                f"torchrun ended without {name}:\n{self.output.read_text()}"
            )
            time.sleep(0.02)
        return json.loads((self.folder / f"{name}.json").read_text())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in self.folder.glob("pid-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def launch(folder, ranks, task, *arguments, **options):
    return Launch(folder, ranks, HERE / "ring_ranks.py", task, folder, *arguments, **options)


@pytest.fixture(scope="module")
def well(tmp_path_factory):
    """What ranks write that end well: among 2, 3 and 4 of them, in one launch."""
    folder = tmp_path_factory.mktemp("well")
    with launch(folder, 4, "well", 2, 3, 4) as started:
        status, output = started.wait(3 * LIMIT)
    assert status == 0, output
    return output


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equal_to_one_process(well, ranks):
    assert re.search(rf"\d+ cases on {ranks} ranks", well), well


def test_ranks_that_disagree(well):
    assert "all mistakes are refused" in well


@pytest.fixture(scope="module")
def dilated(tmp_path_factory):
    """What ranks write over LongNet's branches: 1 to 4 of them, in one launch."""
    folder = tmp_path_factory.mktemp("dilated")
    with Launch(folder, 4, HERE / "ring_dilated.py", "equal", folder) as started:
        status, output = started.wait()
    assert status == 0, output
    return output


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_dilated_equal_to_one_process(dilated, ranks):
    assert re.search(rf"\d+ dilated cases on {ranks} ranks", dilated), dilated


@pytest.mark.parametrize("ranks", [1, 3])
def test_sinks_count_once(tmp_path, ranks):
    with Launch(tmp_path, ranks, HERE / "ring_sinks.py") as started:
        status, output = started.wait()
    assert status == 0 and f"sinks on {ranks} ranks" in output, output


#: Runs a command beside hosts of its own, whose links can be cut.
HOSTS = [str(HERE.parents[2] / "benches" / "ring" / "hosts"), "3", "none"]


def can_make_hosts():
    if os.geteuid() != 0 or not shutil.which("ip") or not os.path.exists(HOSTS[0]):
        return False
    return subprocess.run([*HOSTS, "true"], capture_output=True).returncode == 0


CUT = sys.platform == "linux" and can_make_hosts()
STAGES = ["agree", "make", "forward", "agree again", "backward"]
HOWS = ["kill", "stop", "delay", "flip", "shape", "pattern", "cut"]
#: How a rank fails, in which stage, at which hop of it, and which rank. 3 ranks.
FAULTS = [
    ("kill", "agree", 0, 1),
    ("kill", "make", 3, 2),
    ("kill", "forward", 1, 0),
    ("kill", "backward", 1, 2),
    ("stop", "agree", 0, 2),
    ("stop", "forward", 1, 0),
    ("delay", "backward", 0, 1),
    ("flip", "agree again", 0, 2),
    ("flip", "make", 2, 0),
    ("flip", "forward", 0, 1),
    ("shape", "agree", 0, 1),
    ("pattern", "agree", 1, 2),
    ("interrupt", "agree", 0, 0),
    ("cut", "forward", 1, 1),
]
# Many more: LONGSPAN_FAULTS=300.
_random = random.Random(int(os.environ.get("LONGSPAN_SEED", 0)))
FAULTS += [
    (HOWS[number % len(HOWS)], _random.choice(STAGES), _random.randrange(4), _random.randrange(3))
    for number in range(int(os.environ.get("LONGSPAN_FAULTS", 0)))
]
if not CUT:
    FAULTS = [fault for fault in FAULTS if fault[0] != "cut"]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """The folder of each fault; and all that was written."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "faults.json").write_text(json.dumps(FAULTS))
    folders = [folder / str(number) for number in range(len(FAULTS))]
    for each in folders:
        each.mkdir()
    with launch(folder, 3, "faults", PATIENCE, beside=HOSTS if CUT else ()) as started:
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
        interrupted = how == "interrupt" and rank == victim
        assert report["type"] == ("KeyboardInterrupt" if interrupted else "RingError"), reports
        if rank != victim or how != "delay":
            assert report["time"] - fault["time"] < PATIENCE + 2, (rank, reports, fault)
    named = rf"rank {victim}\b|ranks \[[\d, ]*{victim}"
    said = [report["message"] for rank, report in reports.items() if rank != victim]
    right = [bool(re.search(named, message)) for message in said]
    # Who has seen something wrong ends, and others may see only that: its own words say why.
    assert any(right) if how in ("flip", "interrupt") else all(right), reports


def test_death_that_torchrun_sees(tmp_path):
    with launch(tmp_path, 3, "die") as started:
        fault = started.read("fault")
        reports = [started.read(f"report-{rank}") for rank in (0, 2)]
        status, output = started.wait()
    assert status != 0, output
    for report in reports:
        # Long before its timeout is over: the connection broke.
        assert report["type"] == "RingError" and report["time"] - fault["time"] < 10, reports
    assert any("rank 1" in report["message"] for report in reports), reports
    # Survivors end by themselves.
    assert "Fatal Python error" not in output and "terminate called" not in output, output


@pytest.mark.parametrize("page", ["python/README.md", "docs/cluster.md"])
def test_examples(tmp_path, page):
    text = (HERE.parents[2] / page).read_text()
    (block,) = [x for x in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "ring_" in x]
    (tmp_path / "train.py").write_text(block)
    with Launch(tmp_path, 2, tmp_path / "train.py") as started:
        status, output = started.wait()
    assert status == 0, output


@pytest.mark.parametrize("shards", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 97, 1000])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_token_has_one_rank(tokens, ranks, shards):
    parts = [ring_positions(tokens, rank, ranks, shards) for rank in range(ranks)]
    assert all(part.dtype == torch.int64 for part in parts)
    assert torch.cat(parts).sort().values.equal(torch.arange(tokens))
    if shards == "contiguous":
        assert torch.cat(parts).equal(torch.arange(tokens))
    elif shards == "striped":
        assert [x.tolist() for x in parts] == [[*range(x, tokens, ranks)] for x in range(ranks)]
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 2


def test_positions_refuse():
    with pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        ring_positions(10, 2, 2)
    with pytest.raises(ValueError, match='"zigzag"'):
        ring_positions(10, 0, 2, "zig")
    with pytest.raises(ValueError, match="at least one rank"):
        ring_positions(10, 0, 0)
    with pytest.raises(ValueError, match="tokens is -3"):
        ring_positions(-3, 0, 2)


def test_without_group():
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="init_process_group"):
        ring_attention(x, x, x, "causal")


def test_another_backend():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    x = torch.randn(1, 1, 4, 8)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match="backend fake.*expected gloo"):
            ring_attention(x, x, x, "causal")
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank_is_one_process(alone):
    q = torch.randn(1, 4, 50, 8, requires_grad=True)
    pattern = longspan.causal() & longspan.window(9, 0)
    out = ring_attention(q, q, q, pattern, scale=0.3)
    one = longspan.torch.attention(q, q, q, pattern, scale=0.3)
    torch.testing.assert_close(out, one)
    (ours,), (theirs,) = (torch.autograd.grad(x.square().sum(), q) for x in (out, one))
    torch.testing.assert_close(ours, theirs)


def test_wire_formats(alone):
    x = torch.randn(1, 2, 20, 8)
    want = longspan.torch.attention(x, x, x, "causal")
    # Nothing is sent to oneself.
    for wire in ("exact", "bf16", "int8", 0.1):
        torch.testing.assert_close(ring_attention(x, x, x, "causal", wire=wire), want)
    for wire, message in (
        ("f8", 'wire is "f8", expected "exact", "bf16", "int8", or the largest error'),
        (None, "wire is .*expected"),
        (-1.0, "-1"),
        (float("nan"), "NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            ring_attention(x, x, x, "causal", wire=wire)


def test_numbers_behind_minus_sign(alone):
    """Torch may keep a sign beside the numbers."""
    x = torch.randn(1, 2, 20, 8)
    turned = torch.complex(x, x).conj().imag
    assert turned.is_neg()
    out = ring_attention(turned, x, x, "causal")
    torch.testing.assert_close(out, longspan.torch.attention(-x, x, x, "causal"))


def test_ctrl_c_while_computing(alone):
    q = torch.randn(1, 8, 32_768, 64)
    start = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        # A billion pairs per head: many seconds.
        ring_attention(q, q, q, "full")
    assert time.monotonic() - start < 3
    with pytest.raises(longspan.RingError, match="failed in an earlier call"):
        ring_attention(q, q, q, "full")


def test_group_that_is_gone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    q = torch.randn(1, 4, 50, 8, requires_grad=True)
    out = ring_attention(q, q, q, "causal")
    dist.destroy_process_group()
    # The graph holds what it needs of it.
    out.sum().backward()
    assert q.grad is not None
