#!/usr/bin/env python3
"""What patterns cost: pairs, time relative to dense attention and to the pairs, build time, memory.

    cargo build --release -p longspan --example pattern_cost
    benches/patterns/run.py BINARY OUT.json [TOKENS…]      measures; lines of JSON
    benches/patterns/run.py --table OUT.json               Markdown tables of them

Lengths are 4,096 to 262,144 tokens unless given; head dim 64, four heads up to 16,384 tokens and one
beyond; f32 and bf16; both passes. Patterns are those of `patterns.py`. Dense attention is `full`.
Beyond 65,536 tokens those whose share of pairs does not fall with the length are left out.
"""

import json
import pathlib
import subprocess
import sys

from patterns import PAPERS, PRIMITIVES

LENGTHS = [2**power for power in range(12, 19)]
# Their shares of pairs do not fall with the length.
DENSE = ["full", "causal", "keys", "queries", "not"]
# Lengths beyond which layouts are refused: a run per row and 128 keys is too much work.
LONGEST = {"Sparse Transformer, fixed": 131_072}


def measure(binary, out, lengths):
    with pathlib.Path(out).open("a") as file:
        for tokens in lengths:
            heads, rounds = (4, 5) if tokens <= 16_384 else (1, 2)
            names = {**PRIMITIVES, **PAPERS}
            left_out = DENSE if tokens > 65_536 else []
            left_out = [*left_out, *(name for name, most in LONGEST.items() if tokens > most)]
            names = {name: text for name, text in names.items() if name not in left_out}
            texts = {name: text(tokens) for name, text in names.items()}
            for dtype in ["f32", "bf16"]:
                command = [binary, str(tokens), "64", str(heads), dtype, str(rounds), "chosen"]
                print(f"{tokens} tokens, {dtype}", file=sys.stderr)
                run = subprocess.run(
                    [*command, *texts.values()], check=True, capture_output=True, text=True
                )
                lines = iter(run.stdout.splitlines())
                for name in texts:
                    for _ in range(2):
                        result = json.loads(next(lines)) | {"name": name}
                        # Lists of documents are long, and follow from the length.
                        result["pattern"] = result["pattern"][:200]
                        file.write(json.dumps(result) + "\n")
                file.flush()


def table(path):
    results = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    lengths = sorted({result["tokens"] for result in results})
    by_case = {
        (result["name"], result["tokens"], result["dtype"], result["pass"]): result
        for result in results
    }

    def tokens(length):
        return f"{length // 1024} k" if length >= 1024 else str(length)

    print("### Share of pairs, and memory of a forward pass in f32 relative to inputs and output\n")
    print("| pattern |", " | ".join(tokens(length) for length in lengths), "|")
    print("|---" * (len(lengths) + 1) + "|")
    for name in [*PRIMITIVES, *PAPERS]:
        cells = []
        for length in lengths:
            result = by_case.get((name, length, "f32", "forward"))
            if not result:
                cells.append("")
                continue
            tensor = length * result["heads"] * result["dim"] * 4
            share = 100 * result["pairs"] / length**2
            cells.append(f"{share:.3g} % ({result['bytes'] / (4 * tensor):.2f})")
        print(f"| {name} |", " | ".join(cells), "|")
    for dtype in ["f32", "bf16"]:
        for run in ["forward", "backward"]:
            print(f"\n### {dtype}, {run}: time relative to dense (÷ share of pairs)\n")
            print("| pattern |", " | ".join(tokens(length) for length in lengths), "| pays from |")
            print("|---" * (len(lengths) + 2) + "|")
            for name in [*PRIMITIVES, *PAPERS]:
                cells, pays = [], None
                for length in lengths:
                    result = by_case.get((name, length, dtype, run))
                    if not result or not result["pairs"]:
                        cells.append("")
                        continue
                    time = (result["chosen"] + result["build"]) / result["dense"]
                    pays = pays or (length if time < 1 else None)
                    cells.append(f"{time:.3f} ({time * length**2 / result['pairs']:.2f})")
                print(f"| {name} |", " | ".join(cells), f"| {tokens(pays) if pays else ''} |")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--table", path]:
            table(path)
        case [binary, out, *lengths]:
            measure(binary, out, [int(length) for length in lengths] or LENGTHS)
        case _:
            sys.exit(__doc__)
