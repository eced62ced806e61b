#!/usr/bin/env python3
"""What a BlockMask costs: Longspan's `to_block_mask` against torch's `create_block_mask`.

Needs the package `longspan` and torch 2.5 or later; compiled masks need a C++ compiler. All on the
CPU. Each time is the best of several builds after one that isn't counted. `create_block_mask` looks
at every pair of tokens, so its memory grows with their square: a length is left out where the build
before it, times the growth, would pass `--memory`. It runs in a process of its own, whose peak is
shown.
"""

import argparse
import multiprocessing
import resource
import time

PATTERNS = {
    "window": "causal & (window(1024, 0) | sinks(64))",
    "causal": "causal",
}
BLOCK = 128


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    lengths = [4_096, 16_384, 65_536]
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=lengths, help="lengths for both")
    add("--long", type=int, nargs="*", default=[262_144, 1_048_576], help="lengths for Longspan")
    add("--memory", type=float, default=16.0, help="GiB that a build of torch's may take")
    add("--rounds", type=int, default=5, help="builds, of which the best counts")
    add("--patience", type=float, default=60.0, help="seconds after which rounds end early")
    return parser.parse_args()


def best(build, rounds: int, patience: float) -> float:
    """Seconds of the fastest build, after one that isn't counted."""
    begin = time.perf_counter()
    build()
    times = []
    while len(times) < rounds:
        start = time.perf_counter()
        build()
        times.append(time.perf_counter() - start)
        if time.perf_counter() - begin > patience:
            break
    return min(times)


def peak() -> float:
    """GiB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def measure(engine: str, name: str, tokens: int, given: argparse.Namespace, answer) -> None:
    """Seconds and GiB of one engine, in the process that was made for it."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    import longspan

    pattern = longspan.Pattern(PATTERNS[name])
    if engine == "longspan":

        def build():
            return pattern.to_block_mask(tokens, block=BLOCK)
    else:
        mask_mod = pattern.to_block_mask(256, block=BLOCK).mask_mod
        create = torch.compile(create_block_mask) if engine == "compiled" else create_block_mask

        def build():
            return create(mask_mod, 1, 1, tokens, tokens, "cpu", BLOCK)

    before = peak()
    seconds = best(build, given.rounds, given.patience)
    answer.put((seconds, peak() - before))


def run(engine: str, name: str, tokens: int, given: argparse.Namespace):
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=measure, args=(engine, name, tokens, given, answer))
    process.start()
    process.join()
    if process.exitcode != 0:
        return f"ended with {process.exitcode}"
    return answer.get()


def cell(result) -> str:
    if isinstance(result, str):
        return result
    seconds, gib = result
    return f"{1e3 * seconds:.2f} ms, {gib:.2f} GiB"


def main() -> None:
    given = arguments()
    import torch

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, blocks of {BLOCK}\n")
    print("| pattern | tokens | longspan | create_block_mask | compiled | times faster |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, text in PATTERNS.items():
        last = {}
        for tokens in sorted(given.tokens) + sorted(given.long):
            ours = run("longspan", name, tokens, given)
            theirs = {}
            for engine in ("plain", "compiled"):
                if tokens in given.long:
                    theirs[engine] = "not run"
                    continue
                if engine in last:
                    shorter, gib = last[engine]
                    needed = gib * (tokens / shorter) ** 2
                    if needed > given.memory:
                        theirs[engine] = f"left out: about {needed:.0f} GiB"
                        continue
                theirs[engine] = run(engine, name, tokens, given)
                if not isinstance(theirs[engine], str):
                    last[engine] = (tokens, theirs[engine][1])
            ratios = [
                f"{theirs[engine][0] / ours[0]:,.0f} ×" if isinstance(theirs[engine], tuple) else "–"
                for engine in ("plain", "compiled")
            ]
            line = (f"`{text}`", f"{tokens:,}", cell(ours), *map(cell, theirs.values()))
            print("|", " | ".join(line), "|", ", ".join(ratios), "|", flush=True)


if __name__ == "__main__":
    main()
