"""The example that trains a LongNet: it learns, and one that is killed ends where it would have."""

import csv
import pathlib
import random
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

from longspan.torch import LongNetLM

TRAIN = pathlib.Path(__file__).parents[3] / "examples" / "longnet" / "train.py"
WORDS = ("one ", "two ", "three ", "four ", "longspan ")
SIZES = (
    "--context 64 --batch 2 --hidden 16 --layers 2 --heads 2 --rate 1e-2 --warmup 5 "
    "--validation 512 --validate-every 10 --checkpoint-every 3 --steps 60"
).split()


@pytest.fixture
def folder(tmp_path):
    text = "".join(WORDS[n * n % 7 % len(WORDS)] for n in range(3_000))
    (tmp_path / "text").write_text(text)
    return tmp_path


def start(folder, run, *more):
    command = [sys.executable, TRAIN, *SIZES, *more, "--directory", folder / run, folder / "text"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process):
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said


def curve(folder, run):
    """Everything but times."""
    with (folder / run / "losses.csv").open(newline="") as file:
        return [{**row, "seconds": None} for row in csv.DictReader(file)]


def test_killed_and_resumed(folder):
    finish(start(folder, "whole"))
    expected = curve(folder, "whole")
    assert [int(row["step"]) for row in expected] == list(range(60))
    first, last = (float(expected[i]["bits_per_byte"]) for i in (0, -1))
    # A guess costs eight bits; the text has five words.
    assert abs(first - 8) < 1 and last < 2
    validation = float(expected[-1]["validation"])
    assert abs(validation - last) < 1

    moments = sorted(random.sample(range(2, 58), 3))
    for moment in moments:
        process = start(folder, "killed")
        lines = folder / "killed" / "losses.csv"
        deadline = time.monotonic() + 300
        while not lines.exists() or lines.read_text().count("\n") <= moment:
            assert process.poll() is None and time.monotonic() < deadline, moments
            time.sleep(0.002)
        process.kill()
        process.communicate()
    finish(start(folder, "killed"))
    assert curve(folder, "killed") == expected, moments
    for name in ("checkpoint.safetensors", "model/model.safetensors"):
        whole, killed = (load_file(folder / run / name) for run in ("whole", "killed"))
        assert whole.keys() == killed.keys()
        for tensor in whole:
            assert whole[tensor].equal(killed[tensor]), (tensor, moments)
    assert LongNetLM.load(folder / "whole" / "model").config.hidden_size == 16

    # Done is done, and another training in the same place is refused.
    finish(start(folder, "whole"))
    assert curve(folder, "whole") == expected
    process = start(folder, "whole", "--seed", "2")
    _, said = process.communicate(timeout=600)
    assert process.returncode != 0 and "this training has seed = 1, asked for 2" in said
