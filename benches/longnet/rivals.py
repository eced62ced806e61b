#!/usr/bin/env python3
"""Dilated attention: time, memory and exactness beside the public PyTorch implementations.

    python benches/longnet/rivals.py --torchscale ~/torchscale                 # everything
    python benches/longnet/rivals.py --torchscale ~/torchscale --tokens 32768 --dtype float32

Needs torch, einops, xformers, dilated-attention-pytorch and the package `longspan`; `engines.py` says
what stands in for what on a CPU.

Every cell (engine, shape, type, pass) is a process of its own, so that its peak memory is its own.
The engines of a row live at the same time and take turns, one call each, in alternating order; the
best call counts. Exactness is the difference from the paper's equations in f64, those of the tests.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from engines import ENGINES, Case, make, pairs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAPER = ((2_048, 4_096, 8_192, 16_384, 32_768), (1, 2, 4, 6, 12))
PASSES = ("forward", "training")
GIB = 1 << 30
#: torch's threads spin for some milliseconds after a call; the next call to be measured waits.
PAUSE = 0.05


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--torchscale", metavar="DIR", help="a checkout of microsoft/torchscale")
    add("--engine", nargs="+", choices=ENGINES, default=list(ENGINES))
    add("--tokens", type=int, nargs="+", default=[32_768])
    add("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    add("--pass", nargs="+", choices=PASSES, default=list(PASSES), dest="passes")
    add("--mask", nargs="+", choices=("causal", "full"), default=["causal", "full"])
    add("--segments", type=int, nargs="+", default=PAPER[0])
    add("--rates", type=int, nargs="+", default=PAPER[1])
    add("--heads", type=int, default=12)
    add("--dim", type=int, default=64)
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=3, help="timed calls a cell, after one that isn't")
    add("--only", choices=("time", "exactness"), help="a part of it")
    add("--record", metavar="NAME", help="write benches/record/<date>-longnet-rivals-NAME.{md,json}")
    add("--append", action="store_true", help="add rows to a record of today that is there")
    add("--cell", help=argparse.SUPPRESS)
    return parser.parse_args()


def status(field: str) -> int:
    """Bytes of a field of this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def serve(cell: dict) -> None:
    """A cell's process: a call for each line that arrives, then its peak memory."""
    import torch

    torch.set_num_threads(cell["threads"])
    torch.manual_seed(0)
    case = Case(**cell["case"])
    engine = make(cell["engine"], case, cell["torchscale"])
    shape = (1, cell["tokens"], case.heads, case.dim)
    dtype = getattr(torch, cell["dtype"])
    train = cell["pass"] == "training"
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_(train) for _ in range(3))
    dout = torch.randn(shape).to(dtype)

    def once():
        if not train:
            with torch.no_grad():
                return engine(q, k, v)
        return torch.autograd.grad(engine(q, k, v), (q, k, v), dout)

    before = status("VmRSS")
    say("ready")
    for line in sys.stdin:
        if line.strip() == "end":
            break
        start = time.perf_counter()
        result = once()
        seconds = time.perf_counter() - start
        del result
        say(seconds)
    say(status("VmHWM") - before)


def say(what) -> None:
    print(json.dumps(what), flush=True)


class Cell:
    """A process with an engine in it, or why there is none."""

    def __init__(self, cell: dict):
        command = [sys.executable, str(HERE / "rivals.py"), "--cell", json.dumps(cell)]
        variables = os.environ | {"OMP_NUM_THREADS": str(cell["threads"])}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=variables,
        )
        self.failure = None
        self.seconds = []
        self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        reason = self.process.stderr.read().strip().splitlines()
        self.failure = reason[-1][:120] if reason else f"ended with {self.process.wait()}"
        return None

    def ask(self, what: str):
        if self.failure is None:
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
            return self.answer()
        return None

    def turn(self) -> None:
        time.sleep(PAUSE)
        seconds = self.ask("go")
        if seconds is not None:
            self.seconds.append(seconds)

    def result(self) -> dict:
        peak = self.ask("end")
        if self.failure is not None:
            return {"failure": self.failure}
        self.process.wait()
        return {"seconds": self.seconds[1:], "first": self.seconds[0], "bytes": peak}


def timed(given: argparse.Namespace):
    """Rows of all shapes: engines take turns."""
    for tokens in given.tokens:
        for mask in given.mask:
            for dtype in given.dtype:
                for name in given.passes:
                    case = {
                        "segments": given.segments, "rates": given.rates, "heads": given.heads,
                        "dim": given.dim, "causal": mask == "causal",
                    }
                    cells = {
                        engine: Cell({
                            "engine": engine, "tokens": tokens, "dtype": dtype, "pass": name,
                            "case": case, "threads": given.threads, "torchscale": given.torchscale,
                        })
                        for engine in given.engine
                    }
                    for number in range(given.rounds + 1):
                        order = list(cells.values())
                        for cell in order if number % 2 == 0 else order[::-1]:
                            cell.turn()
                    work = {engine: pairs(engine, Case(**case), tokens) for engine in cells}
                    yield {
                        "tokens": tokens, "mask": mask, "dtype": dtype, "pass": name, "pairs": work,
                        "engines": {engine: cell.result() for engine, cell in cells.items()},
                    }


def time_table(rows: list[dict]) -> list[str]:
    lines = [
        "| tokens | mask | type | pass | engine | pairs | best | others | peak memory | time | memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours = row["engines"].get("longspan")
        for engine, found in row["engines"].items():
            share = row["pairs"][engine] / max(row["pairs"].values())
            head = [f"{row['tokens']:,}", row["mask"], row["dtype"], row["pass"], engine, f"{share:.0%}"]
            if "failure" in found:
                lines.append("| " + " | ".join([*head, found["failure"], "", "", "", ""]) + " |")
                continue
            seconds = sorted(found["seconds"])
            shown = [f"{seconds[0]:.3f} s", " ".join(f"{s:.3f}" for s in seconds[1:])]
            shown.append(f"{found['bytes'] / GIB:.2f} GiB")
            ratios = ["", ""]
            if ours is not None and engine != "longspan" and "failure" not in ours:
                ratios = [
                    f"{seconds[0] / min(ours['seconds']):.1f} ×",
                    f"{found['bytes'] / ours['bytes']:.1f} ×",
                ]
            lines.append("| " + " | ".join([*head, *shown, *ratios]) + " |")
    return lines


def record(given: argparse.Namespace, rows: list[dict], exact: list[str]) -> None:
    import torch

    import longspan

    path = ROOT / "benches" / "record" / f"{date.today()}-longnet-rivals-{given.record}"
    command = " ".join(sys.argv[1:])
    if given.torchscale is not None:
        command = command.replace(given.torchscale, "DIR")
    found = {"rows": rows, "exactness": exact, "commands": [command]}
    if given.append and path.with_suffix(".json").exists():
        before = json.loads(path.with_suffix(".json").read_text())
        found["rows"] = before["rows"] + rows
        found["exactness"] = exact or before["exactness"]
        found["commands"] = before["commands"] + found["commands"]
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    segments, rates = ", ".join(map(str, given.segments)), ", ".join(map(str, given.rates))
    text = [
        f"# Dilated attention beside others, {date.today()}",
        "",
        *(f"`benches/longnet/rivals.py {command}`  " for command in found["commands"]),
        "",
        f"Longspan {longspan.__version__}, torch {torch.__version__}, {given.threads} threads. "
        f"Batch 1, {given.heads} heads of {given.dim}; segments {segments}, rates {rates}. "
        "Attention alone, without projections. Best call after one that isn't counted, the other "
        "calls beside it; peak memory of a process of its own beyond its inputs. Ratios are the "
        "engine ÷ Longspan. `pairs` is what an engine computes of the paper's pairs.",
        "",
        "Neither rival runs on a CPU as published: `benches/longnet/engines.py` says what stands in. "
        "Both call torch's CPU flash attention here.",
        "",
        *time_table(found["rows"]),
        "",
        *found["exactness"],
        "",
    ]
    path.with_suffix(".md").write_text("\n".join(text))


def main() -> None:
    given = arguments()
    if given.cell:
        return serve(json.loads(given.cell))
    given.segments, given.rates = tuple(given.segments), tuple(given.rates)
    rows, exact = [], []
    if given.only != "time":
        from exactness import table

        exact = table(given)
        print("\n".join(exact), flush=True)
    if given.only != "exactness":
        for row in timed(given):
            rows.append(row)
            print("\n".join(time_table([row])[2 if len(rows) > 1 else 0 :]), flush=True)
    if given.record:
        record(given, rows, exact)


if __name__ == "__main__":
    main()
