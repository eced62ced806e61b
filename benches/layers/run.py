#!/usr/bin/env python3
"""Time and memory of real layers: eager, SDPA, FlexAttention and Longspan, forward and training.

    python benches/layers/run.py                        # both models, f32 and bf16, 4 k to 64 k tokens
    python benches/layers/run.py --model modernbert --tokens 4096 32768 --dtype bf16

Needs torch, matplotlib and the package `longspan`. Every cell is a process of its own, so that its
peak memory is its own; engines take turns within a length. A training step is forward, backward and
SGD. "attention" is what an engine takes beyond the same layers without any attention. Cells that
don't fit, or that take over `--patience` seconds, say so.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from model import ENGINES, SHAPES

HERE = Path(__file__).resolve().parent
PASSES = ("forward", "step")
GIB = 1 << 30


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    lengths = [4_096, 8_192, 16_384, 32_768, 65_536]
    add("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    add("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    add("--tokens", type=int, nargs="+", default=lengths)
    add("--engine", nargs="+", choices=ENGINES, default=list(ENGINES))
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=3, help="timed calls a cell, of which the best counts")
    add("--budget", type=float, default=40, help="seconds after which no further call begins")
    add("--patience", type=float, default=600, help="seconds a cell may take")
    add("--memory", type=float, default=20, help="GiB a cell may take")
    add("--record", metavar="NAME", help="write benches/record/<date>-layers-NAME.*")
    add("--cell", help=argparse.SUPPRESS)
    return parser.parse_args()


def status(field: str) -> int:
    """Bytes of a field of this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def measure(cell: dict) -> dict:
    """Seconds and peak bytes of one cell, in a process made for it."""
    import torch
    from model import layers

    # What doesn't fit is an error of this process, not the end of another one.
    limit = int(cell["memory"] * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(cell["threads"])
    dtype = getattr(torch, cell["dtype"])
    train = cell["pass"] == "step"
    model = layers(cell["model"], cell["engine"], cell["tokens"], dtype)
    x = torch.randn(1, cell["tokens"], SHAPES[cell["model"]].width).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def once():
        if not train:
            with torch.no_grad():
                return model(x)
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    begin, before, times = time.perf_counter(), status("VmRSS"), []
    # The first call also makes masks, compiles, and touches memory.
    while len(times) < cell["rounds"] + 1:
        start = time.perf_counter()
        result = once()
        times.append(time.perf_counter() - start)
        assert torch.isfinite(result).all()
        if time.perf_counter() - begin > cell["budget"]:
            break
    best = min(times[1:] or times)
    return {"seconds": best, "first": times[0], "bytes": status("VmHWM") - before}


def needed(cell: dict) -> float:
    """GiB that scores and masks of dense engines take, at least."""
    shape, tokens = SHAPES[cell["model"]], cell["tokens"]
    size = 4 if cell["dtype"] == "float32" else 2
    masks = sum(pattern != "full" for pattern in set(shape.patterns)) * tokens**2
    if cell["engine"] == "eager":
        # Scores, their softmax in f32, and the same rounded; a step keeps them for each layer.
        kept = len(shape.patterns) if cell["pass"] == "step" else 1
        return (masks + shape.heads * tokens**2 * (size + 4 + size) * kept) / GIB
    if cell["engine"] == "sdpa":
        # A boolean mask becomes numbers to be added.
        return masks * (1 + size) / GIB
    return 0.0


def run(cell: dict, given: argparse.Namespace, half):
    """What a cell measured, or why it has nothing; `half` is what it was at half the length."""
    if cell["engine"] == "flex" and cell["pass"] == "step":
        return "no backward"
    # Dense engines take four times as long over twice the length.
    growth = 2 if cell["engine"] in ("longspan", "nothing") else 4
    if isinstance(half, dict) and half["first"] * growth > given.patience:
        return f"not run: half of it took {half['first']:.0f} s"
    wanted = needed(cell)
    if wanted > given.memory:
        return f"doesn't fit: {wanted:.0f} GiB"
    command = [sys.executable, str(HERE / "run.py"), "--cell", json.dumps(cell)]
    variables = os.environ | {"OMP_NUM_THREADS": str(cell["threads"])}
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=given.patience, env=variables
        )
    except subprocess.TimeoutExpired:
        return f"over {given.patience:.0f} s"
    if ran.returncode < 0:
        return f"ended by signal {-ran.returncode}"
    if "DefaultCPUAllocator" in ran.stderr or "MemoryError" in ran.stderr:
        return f"doesn't fit: over {given.memory:.0f} GiB"
    if ran.returncode != 0:
        reason = ran.stderr.strip().splitlines()
        return reason[-1][:80] if reason else f"ended with {ran.returncode}"
    return json.loads(ran.stdout.splitlines()[-1])


def cells(given: argparse.Namespace):
    for model in given.model:
        for dtype in given.dtype:
            for tokens in given.tokens:
                for name in PASSES:
                    yield {"model": model, "dtype": dtype, "tokens": tokens, "pass": name}


def attention_bytes(found: dict, engine: str):
    """What attention takes: beyond the layers without it."""
    own, base = found.get(engine), found.get("nothing")
    if isinstance(own, dict) and isinstance(base, dict):
        return max(own["bytes"] - base["bytes"], 0)
    return None


def cell_text(found: dict, engine: str) -> str:
    own = found.get(engine, "not run")
    if isinstance(own, str):
        return own
    extra = attention_bytes(found, engine)
    memory = f"{own['bytes'] / GIB:.2f} GiB"
    if extra is not None and engine != "nothing":
        memory += f" ({extra / GIB:.2f})"
    return f"{own['seconds']:.2f} s, {memory}"


def against(found: dict, rival: str, figure) -> str:
    ours, theirs = figure("longspan"), figure(rival)
    return f"{theirs / ours:.2f} ×" if ours and theirs else ""


def row(key: dict, found: dict) -> str:
    seconds = lambda engine: found[engine]["seconds"] if isinstance(found.get(engine), dict) else 0
    extra = lambda engine: attention_bytes(found, engine)
    shown = [cell_text(found, engine) for engine in ENGINES]
    ratios = [against(found, "sdpa", seconds), against(found, "sdpa", extra)]
    head = [key["model"], key["dtype"], f"{key['tokens']:,}", key["pass"]]
    return "| " + " | ".join(head + shown + ratios) + " |"


def crossovers(results: list) -> list[str]:
    """From which length on Longspan is faster than SDPA."""
    lines = []
    groups = {(k["model"], k["dtype"], k["pass"]): None for k, _ in results}
    for group in groups:
        mine = [(k["tokens"], f) for k, f in results if (k["model"], k["dtype"], k["pass"]) == group]
        faster = [
            tokens
            for tokens, f in mine
            if isinstance(f.get("longspan"), dict)
            and (not isinstance(f.get("sdpa"), dict) or f["longspan"]["seconds"] < f["sdpa"]["seconds"])
        ]
        said = f"from {min(faster):,} tokens on" if faster else "at none of these lengths"
        lines.append(f"- {', '.join(group)}: Longspan is faster than SDPA {said}")
    return lines


def plot(results: list, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    groups = list({(k["model"], k["dtype"]): None for k, _ in results})
    figure, axes = pyplot.subplots(len(groups), 2, figsize=(10, 3.2 * len(groups)), squeeze=False)
    for line, (model, dtype) in zip(axes, groups):
        for axis, what in zip(line, ("seconds a training step", "GiB that attention takes in it")):
            for engine in ("eager", "sdpa", "longspan"):
                points = []
                for key, found in results:
                    if (key["model"], key["dtype"], key["pass"]) != (model, dtype, "step"):
                        continue
                    extra = attention_bytes(found, engine)
                    if what.startswith("seconds") and isinstance(found.get(engine), dict):
                        points.append((key["tokens"], found[engine]["seconds"]))
                    elif not what.startswith("seconds") and extra:
                        points.append((key["tokens"], extra / GIB))
                if points:
                    axis.plot(*zip(*points), marker="o", label=engine)
            axis.set(xscale="log", yscale="log", title=f"{model}, {dtype}", ylabel=what)
            axis.set_xlabel("tokens")
            axis.set_xticks(sorted({k["tokens"] for k, _ in results}))
            axis.get_xaxis().set_major_formatter(lambda x, _: f"{x / 1024:.0f} k")
            axis.get_xaxis().set_minor_formatter(lambda x, _: "")
            if axis.lines:
                axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    given = arguments()
    if given.cell:
        print(json.dumps(measure(json.loads(given.cell))))
        return
    import torch

    import longspan

    head = [
        f"# Layers of real width, {date.today()}\n",
        f"`benches/layers/run.py {' '.join(sys.argv[1:])}`\n",
        f"Longspan {longspan.__version__}, torch {torch.__version__}, {given.threads} threads; best "
        f"of {given.rounds} calls after one, fewer where they take long; peak memory beyond weights and input, in parentheses "
        "what attention takes of it. Ratios are SDPA ÷ Longspan: time, memory of attention.\n",
        "| model | type | tokens | pass | " + " | ".join(ENGINES) + " | time | memory |",
        "|" + "---|" * (6 + len(ENGINES)),
    ]
    print("\n".join(head), flush=True)
    stem = HERE.parent / "record" / f"{date.today()}-layers-{given.record}"
    known = stem.with_suffix(".json")
    # A run that was stopped goes on where it was.
    earlier = json.loads(known.read_text()) if given.record and known.exists() else []
    results, lines = [], []
    for key in cells(given):
        found = next((f for k, f in earlier if k == key), None)
        if found is not None:
            results.append((key, found))
            lines.append(row(key, found))
            print(lines[-1], flush=True)
            continue
        found = {}
        for engine in given.engine:
            options = {name: getattr(given, name) for name in ("threads", "rounds", "budget", "memory")}
            cell = key | options | {"engine": engine}
            print(f"… {key} {engine}", file=sys.stderr, flush=True)
            halves = (f for k, f in results if k == key | {"tokens": key["tokens"] // 2})
            found[engine] = run(cell, given, next(halves, {}).get(engine))
        results.append((key, found))
        lines.append(row(key, found))
        print(lines[-1], flush=True)
        if given.record:
            known.write_text(json.dumps([[k, f] for k, f in results], indent=1))
    together = sorted(zip(results, lines), key=lambda pair: (pair[0][0]["model"], pair[0][0]["dtype"], pair[0][0]["tokens"]))
    results, lines = [result for result, _ in together], [line for _, line in together]
    tail = crossovers(results)
    print("\n" + "\n".join(tail))
    if given.record:
        plot(results, stem.with_suffix(".png"))
        picture = f"\n![seconds and memory of a training step]({stem.name}.png)\n"
        text = "\n".join([*head, *lines, "", *tail, picture])
        stem.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
