#!/usr/bin/env python3
"""What patterns cost: pairs, time relative to dense attention and to the pairs, build time.

    cargo build --release -p longspan --example pattern_cost
    benches/patterns/run.py BINARY OUT.json [TOKENS…]      measures; lines of JSON
    benches/patterns/run.py --table OUT.json               Markdown tables of them

Lengths are 4,096 to 262,144 tokens unless given; head dim 64, four heads up to 65,536 tokens and one
beyond; f32 and bf16; both passes. Patterns are those of `patterns.py`. Dense attention is `full`.
"""

import json
import pathlib
import subprocess
import sys

from patterns import PAPERS, PRIMITIVES

LENGTHS = [2**power for power in range(12, 19)]


def measure(binary, out, lengths):
    with pathlib.Path(out).open("a") as file:
        for tokens in lengths:
            heads, rounds = (4, 5) if tokens <= 65_536 else (1, 2)
            names = {**PRIMITIVES, **PAPERS}
            texts = {name: text(tokens) for name, text in names.items()}
            for dtype in ["f32", "bf16"]:
                command = [binary, str(tokens), "64", str(heads), dtype, str(rounds)]
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
    for dtype in ["f32", "bf16"]:
        for run in ["forward", "backward"]:
            print(f"\n### {dtype}, {run}: time of dense (÷ share of pairs)\n")
            print("| pattern |", " | ".join(f"{length:,}" for length in lengths), "| from |")
            print("|---" * (len(lengths) + 2) + "|")
            for name in [*PRIMITIVES, *PAPERS]:
                cells, pays = [], None
                for length in lengths:
                    found = [
                        result
                        for result in results
                        if (result["name"], result["tokens"], result["dtype"], result["pass"])
                        == (name, length, dtype, run)
                    ]
                    if not found:
                        cells.append("")
                        continue
                    result = found[-1]
                    time = (result["chosen"] + result["build"]) / result["dense"]
                    pays = pays or (length if time < 1 else None)
                    cells.append(f"{time:.3f} ({time * length**2 / result['pairs']:.2f})")
                print(f"| {name} |", " | ".join(cells), f"| {pays or ''} |")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--table", path]:
            table(path)
        case [binary, out, *lengths]:
            measure(binary, out, [int(length) for length in lengths] or LENGTHS)
        case _:
            sys.exit(__doc__)
