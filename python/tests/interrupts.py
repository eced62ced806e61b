"""Ctrl-C at random times while an operation runs: how long until `KeyboardInterrupt` is raised.

    python interrupts.py OPERATION TRIALS SEED

prints one latency in seconds per line. Operations are repeated until they are interrupted.
"""

import os
import random
import signal
import sys
import threading
import time

import numpy

import longspan


def tensors(heads, tokens, dim, dtype="float32"):
    generator = numpy.random.default_rng(1)
    shape = (1, heads, tokens, dim)
    return [generator.standard_normal(shape, dtype="float32").astype(dtype) for _ in range(3)]


def compile_layout():
    # Residues of three primes: no two rows of blocks repeat, so that all of the work budget is used.
    pattern = longspan.Pattern("strided(97) & !strided(101) & !strided(103)")

    def run():
        try:
            pattern.compile(1 << 20)
        except ValueError as error:
            assert "work" in str(error), error

    return run


def compile_set():
    patterns = [longspan.Pattern(f"causal & strided({p}) & !strided(101)") for p in (89, 97, 103)]
    q = numpy.zeros((1, 3, 1 << 19, 1), dtype="float32")

    def run():
        try:
            longspan.attention(q, q, q, longspan.heads(patterns))
        except ValueError as error:
            assert "work" in str(error), error

    return run


def forward():
    q, k, v = tensors(8, 1 << 16, 64)
    return lambda: longspan.forward(q, k, v, "full")


def forward_long_rows():
    # One task of the forward pass takes seconds: 512 queries over a million keys.
    q = tensors(1, 1 << 10, 128)[0]
    k = numpy.ones((1, 1, 1 << 20, 128), dtype="float32")
    return lambda: longspan.forward(q, k, k, "full")


def decode():
    q = tensors(64, 1, 128)[0]
    k = numpy.ones((1, 1, 1 << 21, 128), dtype="float32")
    return lambda: longspan.forward(q, k, k, "full")


def backward():
    q, k, v = tensors(8, 1 << 16, 64)
    # A plain tuple: an Output would hold the pattern of the forward pass.
    output = tuple(longspan.forward(q, k, v, "window(64, 0)"))
    return lambda: longspan.backward(q, k, v, output, v, "full")


def backward_half():
    # Mostly the phases around the kernels: sums are cleared, row deltas found, gradients rounded.
    q, k, v = tensors(4, 1 << 20, 64, "float16")
    output = longspan.forward(q, k, v, "window(0, 0)")
    return lambda: longspan.backward(q, k, v, output, v, "window(0, 0)")


def dilated():
    q, k, v = tensors(4, 1 << 18, 64)
    pattern = longspan.Dilated([1 << 14, 1 << 18], [1, 16], within="causal")
    output = longspan.forward(q, k, v, pattern)

    def run():
        longspan.forward(q, k, v, pattern)
        longspan.backward(q, k, v, output, v, pattern)

    return run


def dilated_compile():
    q = numpy.zeros((1, 8, 1 << 20, 1), dtype="float32")

    def run():
        within = "causal & strided(97) & !strided(101)"
        pattern = longspan.Dilated([1 << 19, 1 << 20], [1, 3], within=within)
        try:
            longspan.forward(q, q, q, pattern)
        except ValueError as error:
            assert "work" in str(error), error

    return run


def draw():
    layout = longspan.Pattern("causal & (window(1000, 0) | strided(65))").compile(1 << 19)
    return lambda: (str(layout), layout._repr_svg_(), hash(layout))


def ring():
    import torch
    import torch.distributed

    import longspan.torch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    q = torch.randn(1, 4, 1 << 15, 64, requires_grad=True)
    return lambda: longspan.torch.ring_attention(q, q, q, "causal").sum().backward()


OPERATIONS = [
    compile_layout, compile_set, forward, forward_long_rows, decode, backward, backward_half,
    dilated, dilated_compile, draw,
]  # fmt: skip
BESIDE_TORCH = [ring]


def main():
    name, trials, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    run = next(found for found in OPERATIONS + BESIDE_TORCH if found.__name__ == name)()
    delays = random.Random(seed)
    for _ in range(trials):
        sent = []

        def interrupt():
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(delays.uniform(0.05, 1.5), interrupt).start()
        try:
            while True:
                run()
        except KeyboardInterrupt:
            print(time.monotonic() - sent[0], flush=True)


if __name__ == "__main__":
    main()
