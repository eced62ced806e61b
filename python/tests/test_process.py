"""What a long-running process needs: flat memory, Ctrl-C, fork, other threads."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy
import pytest

import longspan

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
posix = pytest.mark.skipif(os.name != "posix", reason="there is no fork")


def resident():
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(code):
    """Another process, in a folder where no sources stand in for the installed package."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=os.path.dirname(__file__),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@linux
def test_hundred_thousand_calls_hold_no_memory():
    q = numpy.ones((1, 1, 16, 8), dtype="float32")
    layout = longspan.causal().compile(16)

    def calls(count):
        for _ in range(count // 10):
            output = longspan.forward(q, q, q, layout, threads=1)
            longspan.backward(q, q, q, output, q, layout, threads=1)
            for _ in range(5):
                longspan.attention(q, q, q, "causal", threads=1)
            for bad in ("windw", longspan.full(), None):
                try:
                    longspan.attention(q, q, q[:, :, 1:], bad)
                except (ValueError, TypeError):
                    pass

    calls(2_000)
    before = resident()
    calls(100_000)
    # One byte per call would be 100 kB; the allocator's own pages come and go in less than 1 MiB.
    assert resident() - before < 1 << 20


@linux
def test_layouts_that_are_kept_are_bounded():
    q = numpy.ones((1, 1, 4_096, 1), dtype="float32")
    before = None
    for number in range(600):
        # A new pattern each time, with 4,096 lengths to hold: 20 MB if all were kept.
        lengths = [1] * (4_096 - number - 1) + [number + 1]
        longspan.attention(q, q, q, longspan.documents(lengths), threads=1)
        if number == 100:
            before = resident()
    from longspan import _longspan

    assert _longspan.cache_stats()["bytes"] <= 64 << 20
    assert resident() - before < 128 << 20


@linux
def test_arrays_of_bf16_are_given_back():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    from producer import Producer

    bits = numpy.zeros((1, 1, 1 << 16, 64), dtype=ml_dtypes.bfloat16).view("uint16")

    def calls():
        q = Producer(bits, code=4)
        out = longspan.attention(q, q, q, "window(1, 1)")
        out.__dlpack__()
        out.__dlpack__(copy=True)

    # The allocator takes a while to find its size.
    for _ in range(30):
        calls()
    before = resident()
    for _ in range(60):
        calls()
    # Two arrays of 8 MiB a call.
    assert resident() - before < 32 << 20


LONG = """
    import numpy, sys, time, longspan
    q = numpy.ones((1, 8, 65_536, 64), dtype="float32")
    print("ready", flush=True)
    start = time.monotonic()
    try:
        {call}
    except KeyboardInterrupt:
        print("interrupted after", time.monotonic() - start)
        # It still works afterwards.
        x = q[:, :, :100]
        print(longspan.attention(x, x, x, "causal").shape)
        sys.exit(0)
    print("not interrupted")
    sys.exit(1)
"""

FORWARD = "longspan.attention(q, q, q, 'full')"
BACKWARD = """longspan.backward(q, q, q, (q, numpy.zeros((1, 8, 65_536), dtype="float32")), q, 'full')"""


@posix
@pytest.mark.parametrize("call", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_ctrl_c(call):
    process = run(LONG.format(call=call))
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    # The whole call takes a minute or more; a loaded machine may take seconds for a tile.
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, out + err
    assert "interrupted after" in out
    assert "(1, 8, 100, 64)" in out


@posix
def test_handler_that_raises_nothing_lets_call_go_on():
    process = run(
        """
        import numpy, signal, threading, os, longspan
        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
        q = numpy.ones((1, 4, 4_096, 64), dtype="float32")
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        while not seen:
            assert (abs(longspan.attention(q, q, q, "causal", threads=1) - 1) < 1e-5).all()
        """
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err


@posix
def test_fork():
    # 2 heads of 136 blocks: from 64 on (at 64 + 64 dims) a call wakes other threads.
    q = numpy.ones((1, 2, 1000, 64), dtype="float32")
    expected = longspan.attention(q, q, q, "causal", threads=2)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            same = longspan.attention(q, q, q, "causal", threads=2)
            status = 0 if numpy.array_equal(same, expected) else 2
        finally:
            os._exit(status)
    for _ in range(300):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert status == 0
    assert numpy.array_equal(longspan.attention(q, q, q, "causal", threads=2), expected)


def test_other_threads_run_meanwhile():
    """A thread that only counts goes on while a call computes: the lock is released."""
    q = numpy.ones((1, 4, 6_000, 64), dtype="float32")
    longspan.attention(q[:, :, :100], q[:, :, :100], q[:, :, :100], "full")
    span, moments = [0.0, 0.0], []
    done = threading.Event()

    def tick():
        while not done.is_set():
            moments.append(time.monotonic())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    time.sleep(0.01)
    span[0] = time.monotonic()
    longspan.attention(q, q, q, "full", threads=1)
    span[1] = time.monotonic()
    done.set()
    ticker.join()
    took = span[1] - span[0]
    inside = sum(span[0] + 0.1 * took < moment < span[1] - 0.1 * took for moment in moments)
    # With the lock held there would be none. How many depends on who else uses the machine.
    assert inside >= 3, f"{inside} ticks in {took:.3f} s"


def test_calls_from_many_threads():
    rng = numpy.random.default_rng(0)
    # 2 heads of 136 blocks: from 64 on (at 64 + 64 dims) a call wakes other threads.
    q = rng.standard_normal((1, 2, 1000, 64), dtype="float32")
    expected = longspan.attention(q, q, q, "causal")
    results = [None] * 6

    def work(index):
        results[index] = [longspan.attention(q, q, q, "causal") for _ in range(5)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(numpy.array_equal(result, expected) for each in results for result in each)
