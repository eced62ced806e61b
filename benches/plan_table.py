"""The tables of docs/plan.md: `longspan plan` for many lengths and numbers of ranks.

    cargo build --release -p longspan-cli
    python3 benches/plan_table.py target/release/longspan

Prints Markdown. Nothing is run but the plan itself, and what each plan took is printed too.
"""

import json
import subprocess
import sys
import time

PATTERNS = ["causal & (window(4096, 0) | sinks(64))", "causal"]
TOKENS = ["1M", "10M", "100M", "1G"]
RANKS = [8, 64, 512, 4096]
MACHINE = ["--machine", "h100", "--network", "400", "--dtype", "bf16"]
SHAPE = ["--heads", "32", "--kv-heads", "8", "--head-dim", "128"]


def plan(binary, pattern, tokens, ranks):
    command = [binary, "plan", pattern, "--tokens", tokens, "--ranks", str(ranks), "--json"]
    start = time.monotonic()
    output = subprocess.run(command + MACHINE + SHAPE, check=True, capture_output=True, text=True)
    return json.loads(output.stdout), time.monotonic() - start


def seconds(ms):
    for limit, divisor, unit in [(1, 1e-3, "µs"), (1e3, 1, "ms"), (6e4, 1e3, "s"), (3.6e6, 6e4, "min")]:
        if ms < limit:
            return f"{ms / divisor:.3g} {unit}"
    return f"{ms / 3.6e6:,.3g} h"


def size(count):
    for unit in ["bytes", "KiB", "MiB", "GiB"]:
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} TiB"


def main(binary):
    slowest = 0
    for pattern in PATTERNS:
        print(f"\n`{pattern}`\n")
        print("| tokens | ranks | simulated | memory a rank | received a rank | hidden | imbalance | forward + backward | limit |")
        print("|---|---|---|---|---|---|---|---|---|")
        for tokens in TOKENS:
            for ranks in RANKS:
                made, took = plan(binary, pattern, tokens, ranks)
                slowest = max(slowest, took)
                print(f"{took:6.1f} s  {pattern} {tokens} {ranks}", file=sys.stderr)
                passes = made["passes"]
                received = sum(each["bytes_received_most"] for each in passes)
                transfer = sum(each["transfer_ms"] for each in passes)
                shares = [each["hidden_share"] or 0 for each in passes]
                hidden = sum(s * each["transfer_ms"] for s, each in zip(shares, passes))
                cells = [
                    tokens,
                    f"{ranks:,}",
                    f"{made['simulated']:,}",
                    size(made["memory_bytes"]),
                    size(received),
                    f"{100 * hidden / transfer:.0f} %" if transfer else "-",
                    f"{made['imbalance']:.3f}",
                    seconds(made["ms"]),
                    made["limit"],
                ]
                print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\nThe slowest plan took {slowest:.0f} s.")


if __name__ == "__main__":
    main(sys.argv[1])
