"""What score additions and dropout cost: dense f32 attention at head dim 64, interleaved, best of many.

    python benches/additions/additions.py [--tokens 2048] [--threads 1]

Prints the time of each pass relative to the plain one, and the slowest ratio of medians beside it.
"""

import argparse
import statistics
import time

import longspan
import numpy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    rng = numpy.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((1, given.heads, given.tokens, 64), dtype="float32") for _ in range(4)
    )
    table = rng.standard_normal((given.heads, 257), dtype="float32")
    options = {
        "plain": {},
        "softcap": {"softcap": 30.0},
        "ALiBi": {"alibi_slopes": [0.01] * given.heads},
        "table": {"bias_table": table, "bias_right": 128},
        "dropout": {"dropout_p": 0.1, "dropout_seed": 1},
        "sink logits": {"sink_logits": [0.0] * given.heads},
    }
    times = {name: ([], []) for name in options}
    for _ in range(given.rounds):
        for name, chosen in options.items():
            attention = longspan.Attention("full", threads=given.threads, **chosen)
            start = time.perf_counter()
            output = attention.forward(q, k, v)
            middle = time.perf_counter()
            attention.backward(q, k, v, output, dout)
            times[name][0].append(middle - start)
            times[name][1].append(time.perf_counter() - middle)
    print(f"{given.tokens} tokens, {given.heads} heads, d 64, {given.threads} threads; best (median)")
    for name, passes in times.items():
        ratios = [
            f"{min(own) / min(plain):.3f} ({statistics.median(own) / statistics.median(plain):.3f})"
            for own, plain in zip(passes, times["plain"])
        ]
        print(f"{name:12} forward {ratios[0]}  backward {ratios[1]}")


if __name__ == "__main__":
    main()
