"""What each rank does in ``test_ring.py``: ``torchrun ring_ranks.py <task> <folder> [arguments]``.

A task that finds something wrong ends with an exception, and torchrun with it.

Over 500 lines, in one file: torchrun starts it by its path, and starting torch is most of a test's time, so that
the tasks of one fixture share a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import dense
import numpy
import oracle
import torch
import torch.distributed as dist

import longspan
from longspan.torch import DilatedAttention, _post, _ranks, attention
from longspan.torch import ring_attention, ring_positions

FOLDER = pathlib.Path(sys.argv[2])
#: Longer than anything here takes.
LONG = 60.0
#: The group that computes; all ranks where it is None.
GROUP: dist.ProcessGroup | None = None


# Equal to one process.

DOCUMENTS = [30, 0, 41, 26]
EDGES = numpy.cumsum(DOCUMENTS)
WIDE, ODD = (1, 4, 1, 131, 131, 32, 32), (2, 6, 2, 97, 97, 13, 7)


def cases():
    """``(text, rule, size, shards, dtype)``."""
    rules = {
        **dense.RULES,
        "causal & documents([30, 0, 41, 26])": lambda q, k: k <= q
        and numpy.searchsorted(EDGES, q, "right") == numpy.searchsorted(EDGES, k, "right"),
        "causal & (window(9, 0) | sinks(4) | dilated(24, 3))": lambda q, k: k <= q
        and (q - k <= 9 or k < 4 or (q // 24 == k // 24 and (q % 24) % 3 == 0 == (k % 24) % 3)),
        "!full": lambda q, k: False,
    }
    for shards in ("contiguous", "zigzag", "striped"):
        for text, rule in rules.items():
            fits = "documents" in text or "window" in text
            yield text, rule, ODD if fits else WIDE, shards, torch.float32
        for tokens in (0, 1, 2, 5):
            size = (1, 2, 1, tokens, tokens, 8, 8)
            yield "causal", rules["causal"], size, shards, torch.float32
        for dtype in (torch.bfloat16, torch.float16):
            for text in ("causal", "global_tokens(3) | window(7, 7)"):
                yield text, rules[text], ODD, shards, dtype


def strided(x, number):
    """The same numbers in another order in memory."""
    if number % 3 == 1:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if number % 3 == 2:
        return x.repeat_interleave(2, 3)[..., ::2]
    return x


def around(all_of, text, number, shards, **options):
    """Both passes of this rank; ``all_of`` are q, k, v, dout, dlse of the whole sequence."""
    tokens = all_of[0].shape[2]
    mine = ring_positions(tokens, dist.get_rank(), dist.get_world_size(GROUP), shards)
    q, k, v, dout, dlse = (x.detach().index_select(2, mine) for x in all_of)
    q, k, v = (strided(x, number + i).requires_grad_() for i, x in enumerate((q, k, v)))
    if number % 2:
        options["tokens"] = tokens
    out, lse = ring_attention(
        q, k, v, text, shards=shards, enable_gqa=True, return_lse=True, group=GROUP, **options
    )
    assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)
    # Every other time without a gradient of the log-sum-exp.
    used = 1 + number % 2
    gradients = torch.autograd.grad([out, lse][:used], (q, k, v), [dout, dlse][:used])
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients)))


def joined(mine, shards, tokens):
    """Everybody's rows as one, on rank 0."""
    everybody = [None] * dist.get_world_size(GROUP) if dist.get_rank() == 0 else None
    dist.gather_object({name: x.detach() for name, x in mine.items()}, everybody, group=GROUP)
    if everybody is None:
        return None
    whole = {}
    for name in mine:
        parts = [results[name] for results in everybody]
        shape = list(parts[0].shape)
        shape[2] = tokens
        whole[name] = torch.full(shape, torch.nan, dtype=parts[0].dtype)
        for rank, part in enumerate(parts):
            whole[name][:, :, ring_positions(tokens, rank, len(parts), shards)] = part
    return whole


def check(text, rule, size, shards, dtype, number, **options):
    rng = numpy.random.default_rng(number)
    q, k, v, dout = dense.tensors(rng, size, dtype)
    dlse = torch.from_numpy(rng.standard_normal(q.shape[:3], dtype="float32"))
    mine = around((q, k, v, dout, dlse), text, number, shards, **options)
    got = joined(mine, shards, q.shape[2])
    if got is None:
        return
    mask = rule if isinstance(rule, numpy.ndarray) else oracle.mask(rule, q.shape[2], k.shape[2])
    where = f"case {number}: {text}, {size}, {shards}, {dtype}"
    try:
        if q.shape[2] == 0:
            assert [got[name].shape for name in ("dq", "dk", "dv")] == [q.shape, k.shape, v.shape]
            return
        used = dense.array(dlse) if number % 2 else None
        q, k, v, dout = map(dense.array, (q, k, v, dout))
        truth = oracle.attention(q, k, v, mask, dout, used, **options)
        dense.check(got, truth, dtype)
    except AssertionError as error:
        raise AssertionError(where) from error


def equal(*ranks):
    """Among as many ranks as each number says; others wait."""
    global GROUP
    for count in map(int, ranks):
        GROUP = dist.new_group(list(range(count)), timeout=timedelta(seconds=LONG))
        if dist.get_rank() < count:
            _equal()
        dist.barrier()
    GROUP = None


def _equal():
    count = 0
    for number, (text, rule, size, shards, dtype) in enumerate(cases()):
        # Once with a gradient of the log-sum-exp, once without, and with other strides.
        for again in range(2):
            check(text, rule, size, shards, dtype, 2 * number + again)
            count += 1
    heads = ["causal", "window(20, 3)", "!strided(3)", "full"]
    mask = numpy.stack([oracle.mask(dense.RULES[text], 131, 131) for text in heads])
    check(str(longspan.heads(heads)), mask, WIDE, "zigzag", torch.float32, 1001)
    check("causal", dense.RULES["causal"], WIDE, "striped", torch.float32, 1002, scale=-0.7)
    assert count > 100
    once_more()
    wires()
    print(f"{count} cases on {dist.get_world_size(GROUP)} ranks", flush=True)


def once_more():
    """Rings are kept; a rank whose threads have changed has the others make a new one."""
    ranks = _ranks.ranks_of(GROUP)[1]
    before = ranks._made
    numbers = torch.randn(1, 2, 12, 8)

    def call():
        return ring_attention(numbers, numbers, numbers, "window(30, 5)", softcap=3.0, group=GROUP)

    first = call()
    assert ranks._made == before + 1
    assert torch.equal(call(), first)
    assert ranks._made == before + 1
    threads = torch.get_num_threads()
    if dist.get_rank() == 1:
        torch.set_num_threads(threads + 1)
    assert torch.equal(call(), first)
    torch.set_num_threads(threads)
    # Now it has an older ring for this than the others have.
    assert torch.equal(call(), first)
    assert ranks._made == before + 3
    assert torch.equal(call(), first)
    assert ranks._made == before + 3
    assert len(ranks._rings) <= _ranks.RINGS
    everybody = [torch.empty_like(numbers) for _ in range(dist.get_world_size(GROUP))]
    dist.all_gather(everybody, numbers, group=GROUP)
    whole = torch.cat(everybody, 2)
    one = attention(whole, whole, whole, "window(30, 5)", softcap=3.0)
    torch.testing.assert_close(first, one[:, :, 12 * dist.get_rank() :][:, :, :12])
    with torch.no_grad():
        assert torch.equal(call(), first)
    half = torch.randn(1, 2, 4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ring_attention(half, half, half, "causal", group=GROUP)
    assert out.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(out.float().square().sum(), half)
    assert gradient.dtype == torch.float32
    with contextlib.suppress(RuntimeError):
        out = ring_attention(half, half, half, "causal", group=GROUP)
        (first,) = torch.autograd.grad(out.sum(), half, create_graph=True)
        first.sum().backward()
        raise AssertionError("a second derivative came back")


def wires():
    """Keys and values that are sent as fewer bytes: results are near, gradients come back."""
    ranks = _ranks.ranks_of(GROUP)[1]
    x = torch.randn(1, 2, 64, 16)

    def call(wire):
        q = x.clone().requires_grad_()
        out = ring_attention(q, x, x, "full", wire=wire, group=GROUP)
        (gradient,) = torch.autograd.grad(out.square().sum(), q)
        received, _ = next(reversed(ranks._rings.values())).ring.traffic()
        return out, gradient, received

    exact = call("exact")
    assert torch.equal(exact[0], ring_attention(x, x, x, "full", group=GROUP))
    for wire in ("bf16", "int8", 0.02):
        near = call(wire)
        assert not torch.equal(near[0], exact[0]), wire
        # Elements are below 5: bf16 is off by 1/256 of them, int8 by 1/254 of the largest.
        for got, want in zip(near[:2], exact[:2]):
            torch.testing.assert_close(got, want, atol=0.1, rtol=0.1)
        assert near[2] < exact[2], (wire, near[2], exact[2])


# Ranks that disagree.


@contextlib.contextmanager
def refused(kind, pattern, seconds=5.0):
    """The body raises such an error, soon."""
    start = time.monotonic()
    try:
        yield
    except kind as error:
        assert type(error) is kind, type(error)
        assert re.search(pattern, str(error)), str(error)
    else:
        raise AssertionError(f"nothing was raised, expected {kind.__name__}: {pattern}")
    took = time.monotonic() - start
    assert took < seconds, f"{took} s"


def disagree():
    """Each mistake of rank 1 is an error on every rank, soon; then all go on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    odd = rank == 1
    x = torch.randn(2, 4, 10, 16)

    def call(x=x, pattern="causal", timeout=LONG, **options):
        return ring_attention(x, x, x, pattern, timeout=timeout, **options)

    def fine():
        assert torch.isfinite(call()).all()

    def about(topic):
        others = ", ".join(str(other) for other in range(size) if other != 1)
        here, there = ("rank 1", others) if odd else (others, "rank 1 ")
        return f"disagree about {topic}: .*{here}.*{there}"

    ring_error = longspan.RingError
    fine()
    dist.barrier()
    for topic, mistake in {
        "the pattern": {"pattern": "window(3, 3)"},
        "shards and tokens": {"shards": "zigzag"},
        "shapes and types": {"x": torch.randn(2, 2, 10, 16)},
        "scale and softcap": {"scale": 0.3},
        "whether there are gradients": {"x": x.clone().requires_grad_()},
    }.items():
        with refused(ring_error, about(topic)):
            call(**(mistake if odd else {}))
        fine()
    with refused(ring_error, about("shapes and types")):
        call(x.bfloat16() if odd else x)
    with refused(ring_error, about("shards and tokens")):
        call(tokens=10 * size + odd)
    with refused(ring_error, about("shards and tokens")):
        call(tokens=10 * size if odd else None)
    fine()
    # Known to all once they have told each other.
    for tokens in (None, 10 * size):
        with refused(ValueError, r"rank \d holds 1[01] tokens, expected 1[01]"):
            call(torch.randn(2, 4, 11, 16) if odd else x, tokens=tokens)
    with refused(ring_error, about("the pattern")):
        call(pattern=longspan.Dilated([8], [2], overlap="union" if odd else "weighted"))
    for pattern in ("documents([3, 4])", longspan.Dilated([8], [2], within="documents([3, 4])")):
        with refused(ValueError, "documents"):
            call(pattern=pattern)
    with refused(ValueError, "head dim 0"):
        call(torch.randn(2, 4, 10, 0))
    fine()
    # Known to rank 1 alone.
    own = [
        (TypeError, "float64", {"x": x.double()}),
        (ValueError, "3 axes", {"x": x[0]}),
        (ValueError, "windw", {"pattern": "windw(3)"}),
        (ValueError, "is on meta", {"x": x.to("meta")}),
        (TypeError, "Layout", {"pattern": longspan.causal().compile(10)}),
        (TypeError, r"longspan\.Dilated\(", {"pattern": DilatedAttention([8], [2])}),
        (ValueError, "diagonal", {"shards": "diagonal"}),
        (ValueError, "tokens is -1", {"tokens": -1}),
        (TypeError, "expected a torch.Tensor", {"x": x.numpy()}),
    ]
    for kind, what, mistake in own:
        with refused(kind, what) if odd else refused(ring_error, "rank 1 raised an error"):
            call(**(mistake if odd else {}))
    fine()
    # Another order of calls.
    with refused(ring_error, about("the pattern")):
        call(pattern="full" if odd else "window(2, 2)")
    y = torch.randn(2, 4, 10, 16, requires_grad=True)
    first, second = call(y), call(y, pattern="full")
    with refused(ring_error, about("which pass comes next")):
        (second if odd else first).sum().backward(retain_graph=True)
    with refused(ring_error, about("which pass comes next")):
        call() if odd else first.sum().backward(retain_graph=True)
    (first + second).sum().backward()
    fine()
    with refused(ValueError, "timeout is 0"):
        call(timeout=0)
    # A group of some of the ranks.
    some = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        assert torch.isfinite(call(group=some)).all()
    else:
        with refused(ValueError, "member"):
            call(group=some)
    dist.barrier()


def well(*ranks):
    """All that ranks go on after."""
    equal(*ranks)
    disagree()
    print("all mistakes are refused", flush=True)


# Ranks that fail.

#: What `Ranks.run` does in turn, with a ring that isn't kept yet.
STAGES = ["agree", "make", "forward", "agree again", "backward"]
#: What a rank calls in place of the right thing, after which all can go on.
MISTAKES = {
    "shape": lambda x: (torch.randn(1, 4, 40, 16, requires_grad=True), PATTERN),
    "pattern": lambda x: (x, "causal"),
}
PATTERN = "causal | sinks(3)"


def fail(how, stage, hop, victim, timeout):
    """One rank fails at a hop of a stage; all that live say what they see, and when."""
    rank, victim, timeout = dist.get_rank(), int(victim), float(timeout)
    torch.manual_seed(0)
    whole = torch.randn(1, 2, 40 * dist.get_world_size(), 16, requires_grad=True)
    all_out = attention(whole, whole, whole, PATTERN)
    (all_gradients,) = torch.autograd.grad(all_out.sum(), whole)
    mine = slice(40 * rank, 40 * rank + 40)
    x = whole.detach()[:, :, mine].requires_grad_()
    dist.barrier()
    if rank == victim and how not in MISTAKES:
        _fail_at((STAGES.index(stage), int(hop)), how, timeout)
    elif how == "interrupt":
        # So that the victim is waiting when Ctrl-C arrives.
        time.sleep(1.5)
    report = {"type": None}
    try:
        # A second time, because no rank can learn of a fault in the very last message of a
        # pass: a rank that has its results by then learns of it in the next one.
        for turn in range(2):
            given, pattern = x, PATTERN
            if rank == victim and how in MISTAKES and turn == int(hop) % 2:
                given, pattern = MISTAKES[how](x)
                write("fault", {"time": time.time(), "pid": os.getpid()})
            tokens = whole.shape[2]
            out = ring_attention(given, given, given, pattern, tokens=tokens, timeout=timeout)
            (gradients,) = torch.autograd.grad(out.sum(), given)
            torch.testing.assert_close(out, all_out[:, :, mine])
            torch.testing.assert_close(gradients, all_gradients[:, :, mine])
    except (Exception, KeyboardInterrupt) as error:
        report = {"type": type(error).__name__, "message": str(error)}
    report["time"] = time.time()
    if how in MISTAKES:
        assert torch.isfinite(ring_attention(x, x, x, PATTERN, timeout=LONG)).all()
    elif report["type"] is not None:
        with refused(longspan.RingError, "failed in an earlier call"):
            ring_attention(x, x, x, "causal", timeout=timeout)
    write(f"report-{rank}", report)


def die():
    """The same where torchrun sees the death, and tells all others to end."""
    # They go on until they have said what they saw.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fail("kill", "forward", 1, 1, 20.0)


def faults(timeout):
    """Many faults, one after another, each of other processes: those that torchrun has started
    fork, before torch has a thread, which saves them the time to load it."""
    global FOLDER
    rank, all_faults = int(os.environ["RANK"]), json.loads((FOLDER / "faults.json").read_text())
    parent = FOLDER
    # What children don't write to stays the same memory as their parent's.
    gc.freeze()
    # Where the machine stood still meanwhile, once more.
    tries = ((number, attempt) for number in range(len(all_faults)) for attempt in range(5))
    done = set()
    for number, attempt in tries:
        if number in done:
            continue
        fault = all_faults[number]
        FOLDER = parent / str(number) / str(attempt)
        FOLDER.mkdir(exist_ok=True)
        child = os.fork()
        if not child:
            if fault[0] == "cut":
                _move_to_host(rank)
            store = f"file://{FOLDER}/store"
            ranks = int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
            fail(*fault, timeout)
            # The child ends as any process does.
            return
        status, still = _wait(child, fault[3] == rank)
        if fault[0] == "cut" and fault[3] == rank:
            _link(rank, "up")
        write(f"status-{rank}", {"status": status, "still": still})
        if not _stood_still():
            done.add(number)


#: A loop that sleeps for 10 ms takes longer only where the machine, or this process, stands still.
STILL = 1.0


def _stood_still():
    """Whether any rank has seen the machine stand still, once all are here."""
    end = time.monotonic() + 2 * LONG
    while len(files := list(FOLDER.glob("status-*.json"))) < int(os.environ["WORLD_SIZE"]):
        assert time.monotonic() < end, f"{FOLDER}: a rank is missing"
        time.sleep(0.01)
    return any(json.loads(file.read_text())["still"] > STILL for file in files)


def _host(rank):
    """A network namespace that ``benches/ring/hosts`` has made."""
    return f"{os.environ['LONGSPAN_HOST_NAME']}-{rank}"


def _move_to_host(rank):
    """This process has another network from here on."""
    network = os.open(f"/var/run/netns/{_host(rank)}", os.O_RDONLY)
    clone_newnet = 0x4000_0000
    if ctypes.CDLL(None, use_errno=True).setns(network, clone_newnet):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def _link(rank, state):
    ip = ["ip", "netns", "exec", _host(rank), "ip", "link", "set", "eth0", state]
    subprocess.run(ip, check=True)


def _wait(child, is_victim):
    """How a child ends, and for how long this process stood still meanwhile. A victim that has
    stopped is killed once all others have ended."""
    last, still = time.monotonic(), 0.0
    end = last + LONG
    while last < end:
        now = time.monotonic()
        last, still = now, max(still, now - last)
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), still
        others = len(list(FOLDER.glob("status-*.json"))) == int(os.environ["WORLD_SIZE"]) - 1
        if is_victim and others and "stopped" in pathlib.Path(f"/proc/{child}/status").read_text():
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "it hung", still


def at_hop(sends):
    """What a rank does where a hop begins that sends these messages, given as ``(rank, address, length)``."""


def _fail_at(place, how, timeout):
    """Has this rank fail at the first hop from a place (stage, hop) on."""
    global at_hop
    seen = {"stage": -1, "hop": 0, "failed": False}
    run, start = _ranks.Ranks.run, _post.Post.start

    def count_stages(self, work):
        seen["stage"] += 1
        seen["hop"] = 0
        return run(self, work)

    def at_hop(sends):
        due = (seen["stage"], seen["hop"]) >= place and not seen["failed"]
        if due and (sends or how != "flip"):
            seen["failed"] = True
            write("fault", {"time": time.time(), "pid": os.getpid()})
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "interrupt":
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            elif how == "interrupt now":
                os.kill(os.getpid(), signal.SIGINT)
            elif how == "delay":
                time.sleep(timeout + 3)
            elif how == "cut":
                _link(dist.get_rank(), "down")
            elif how == "flip":
                _, address, length = sends[0]
                draw = random.Random(repr(place))
                # In a ring's header there are bytes that are not read.
                at = draw.choice([at for at in range(length) if not 48 <= at < 64])
                ctypes.c_uint8.from_address(address + at).value ^= 1 << draw.randrange(8)
        seen["hop"] += 1

    def count_hops(self, sends, receives):
        at_hop(sends)
        return start(self, sends, receives)

    _ranks.Ranks.run, _post.Post.start = count_stages, count_hops


def write(name, what):
    """A file that is there as a whole or not at all."""
    (FOLDER / f"{name}.new").write_text(json.dumps(what))
    (FOLDER / f"{name}.new").rename(FOLDER / f"{name}.json")


if __name__ == "__main__":
    task = {"well": well, "die": die, "faults": faults}[sys.argv[1]]
    (FOLDER / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    if task is not faults:
        # Some ranks wait while others compute.
        dist.init_process_group("gloo", timeout=timedelta(seconds=10 * LONG))
        torch.manual_seed(dist.get_rank())
    task(*sys.argv[3:])
    if task is well:
        dist.destroy_process_group()
