"""The ranks of a process group: what they agree on before a call, and the rings they have made.

Before each pass every rank tells every other in a few bytes what it is about to compute, and how
many tokens it holds. So ranks that call different things, in another order, or not at all because
of an error of their own, end with an error on every rank, at once and by name. Only then does a
message travel whose length follows from a shape.

Making a ring takes several rounds of messages, so a group keeps those it has made, the last
``RINGS`` used. Each tells the others which one it has for a call; where that isn't the same for all
(a rank's number of threads has changed, say), all make a new one: no rank's memory of earlier calls has
to be like another's.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import struct
import threading
import weakref
from collections import OrderedDict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import torch
import torch.distributed as dist

import longspan
from longspan import Dilated, RingError
from longspan._longspan import Ring, RingSchedule, ring_check, ring_gather, ring_shards
from longspan.torch._engine import BLOCK, engine_of
from longspan.torch._post import Post
from longspan.torch._ring_host import AnyRing, HostRing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Rings that a group keeps. A model has one for each pattern and shape; one takes what its layouts
#: take.
RINGS = 32

#: Messages about calls have this tag, those of rings the ones after it. Callers' own have others.
_TAG = 0x4C53_0000


#: Tags of rings repeat after so many: long after the last message of an earlier one.
_TAGS = 0xFFFF

#: From the tag of a ring to that of its messages of a device.
_DEVICE_TAG = 0x2_0000

#: Seconds that ranks wait for what another tells them, where a caller has no say in it.
TIMEOUT = 60.0


class Problem(NamedTuple):
    """What a ring computes, the same on every rank; and how this rank does its part."""

    pattern: str | Dilated
    """Ranks compare its ``repr``."""
    shards: str
    tokens: int | None
    """Of the whole sequence; None until ranks have told how many they hold."""
    sizes: tuple[int, int, int, int, int]
    """Batch entries, heads of queries and of keys, head dims of keys and of values."""
    dtype: str
    scale: float | None
    softcap: float | None
    wire: str | float
    threads: int
    precision: str
    timeout: float
    device: torch.device | None
    """This rank's, where it isn't for Longspan's own kernels to compute."""
    engine: str

    def topics(self) -> dict[str, Any]:
        """What ranks have to agree about, by name."""
        return {
            "the pattern": self.pattern,
            "shards and tokens": (self.shards, self.tokens),
            "shapes and types": (self.sizes, self.dtype, self.engine),
            "scale and softcap": (self.scale, self.softcap),
            "the wire format": self.wire,
        }


class Made(NamedTuple):
    """A ring, and which one of its group it is."""

    ring: AnyRing
    number: int


class State(enum.IntEnum):
    """How a rank comes to a call."""

    READY = 0
    #: Its own arguments are wrong.
    RAISED = 1


#: What ranks compare. Topics that a pass hasn't got are the same for all.
_TOPICS = (
    "Longspan's version",
    "which pass comes next",
    "the pattern",
    "shards and tokens",
    "shapes and types",
    "scale and softcap",
    "the wire format",
    "score additions and dropout",
    "whether there are gradients",
)


class Told(NamedTuple):
    """What a rank tells the others before a pass."""

    state: State
    tokens: int
    """That it holds."""
    ring: int
    """The number of the ring that it has for the call, or -1."""
    seed: int
    """Of dropout; that of the first rank counts."""
    hashes: tuple[int, ...]
    """One per topic."""

    @classmethod
    def about(cls, state: State, tokens: int, ring: int, seed: int, topics: dict[str, Any]) -> Told:
        topics = {"Longspan's version": longspan.__version__, **topics}
        return cls(state, tokens, ring, seed, tuple(_hash(topics.get(topic)) for topic in _TOPICS))

    def pack(self) -> bytes:
        numbers = _FORM.pack(self.state, self.tokens, self.ring, self.seed, *self.hashes)
        return numbers + _digest(numbers)

    @classmethod
    def unpack(cls, told: bytes) -> Told | None:
        """None if it was damaged on its way."""
        numbers, digest = told[: _FORM.size], told[_FORM.size :]
        if _digest(numbers) != digest:
            return None
        state, tokens, ring, seed, *hashes = _FORM.unpack(numbers)
        return cls(State(state), tokens, ring, seed, tuple(hashes))


_FORM = struct.Struct(f"<Qqqq{len(_TOPICS)}Q")


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=8).digest()


def _hash(value: Any) -> int:
    return int.from_bytes(_digest(repr(value).encode()), "little")


class Ranks:
    """The ranks of a group, seen from one of them. Its ``lock`` is held from what ranks agree on
    to the end of the pass."""

    def __init__(self, group: ProcessGroup):
        self.lock = threading.Lock()
        self.rank, self.size = group.rank(), group.size()
        self._group = weakref.ref(group)
        self._beside: ProcessGroup | None = None
        self._post: Post | None = None
        self._devices: set[torch.device] = set()
        self._calls = 0
        self._rings: OrderedDict[Problem, Made] = OrderedDict()
        self._made = 0
        self._broken: str | None = None

    def check(self) -> None:
        """Refuses a group whose ranks no longer know what messages are on their way."""
        if self._broken is not None:
            raise RingError(
                f"this process group has failed in an earlier call ({self._broken}): make a new one "
                "with torch.distributed.new_group, or start all ranks again"
            )

    def raised(self, timeout: float) -> None:
        """Tells the others that this rank's own arguments are wrong, where they can hear it."""
        if self._broken is not None:
            return
        try:
            self._tell(State.RAISED, 0, {}, timeout)
        except RingError:
            pass

    def numbers(self, what: str, find: Callable[[], tuple[int, Any]]) -> list[int]:
        """A number of each rank, which ``find`` returns with what has to be the same for all; an error of
        one rank's is an error on all of them."""
        with self.lock:
            self.check()
            try:
                mine, same = find()
            except Exception:
                self.raised(TIMEOUT)
                raise
            topics = {"which pass comes next": what, "shapes and types": same}
            told = self._tell(State.READY, mine, topics, TIMEOUT)
        return [rank.tokens for rank in told]

    def before_forward(
        self, problem: Problem, tokens: int, gradients: bool, additions: Any, seed: int
    ) -> tuple[Made, int]:
        """Agrees on a forward pass, for which this rank holds so many tokens; returns its ring, and the
        seed of dropout."""
        topics = {
            "which pass comes next": "forward",
            "whether there are gradients": gradients,
            "score additions and dropout": additions,
        }
        if problem.tokens is None:
            topics_now = {**topics, **problem.topics()}
            told = self._tell(State.READY, tokens, topics_now, problem.timeout)
            problem = problem._replace(tokens=sum(rank.tokens for rank in told))
        made = self._rings.get(problem)
        number = -1 if made is None else made.number
        topics = {**topics, **problem.topics()}
        told = self._tell(State.READY, tokens, topics, problem.timeout, number, seed)
        # From here on all ranks know the same: what one refuses, all refuse.
        self._check_tokens(problem, [rank.tokens for rank in told])
        if number == -1 or any(rank.ring != number for rank in told):
            ring_check(problem.pattern, problem.tokens, *problem.sizes[:2])
            made = self._make(problem)
        self._rings[problem] = made
        self._rings.move_to_end(problem)
        if len(self._rings) > RINGS:
            self._rings.popitem(last=False)
        return made, told[0].seed

    def before_backward(self, made: Made, timeout: float) -> None:
        """Agrees on a backward pass."""
        self._tell(State.READY, 0, {"which pass comes next": ("backward", made.number)}, timeout)

    def run(self, work: Callable[[], Any]) -> Any:
        """Something that takes all ranks. Whatever ends it, messages may be left behind."""
        try:
            return work()
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            self._rings.clear()
            for device in self._devices:
                from longspan.torch._transfers import abort

                # Only the error that has ended the call matters to the caller.
                with contextlib.suppress(Exception):
                    abort(self._group(), device)
            raise

    def _make(self, problem: Problem) -> Made:
        number = self._made
        self._made += 1
        tag = _TAG + 1 + number % _TAGS
        make = self._make_host if problem.device is None else self._make_device
        return Made(self.run(lambda: make(problem, tag)), number)

    def _make_host(self, problem: Problem, tag: int) -> AnyRing:
        *arguments, _, _ = problem
        return HostRing(Ring(Post(self._control(), tag), *arguments))

    def _make_device(self, problem: Problem, tag: int) -> AnyRing:
        from longspan.torch._ring_device import DeviceRing
        from longspan.torch._transfers import Transfers

        control, device = self._control(), problem.device
        self._devices.add(device)
        schedule = RingSchedule(
            Post(control, tag), *problem[:7], timeout=problem.timeout, block=BLOCK
        )
        transfers = Transfers(self._group(), device, tag + _DEVICE_TAG)
        notices = (weakref.ref(control), tag)
        return DeviceRing(schedule, engine_of(device), device, transfers, notices, problem.timeout)

    def _control(self) -> ProcessGroup:
        """The group through which ranks agree and tell each other of failures: this one where it has Gloo, or
        one with Gloo beside it, which all ranks make at their first call."""
        group = self._group()
        if group is None or _backends(group).get("cpu") == "gloo":
            return group
        if self._beside is None:
            ranks = dist.get_process_group_ranks(group)
            self._beside = dist.new_group(
                ranks,
                backend="gloo",
                timeout=timedelta(seconds=TIMEOUT),
                use_local_synchronization=True,
            )
        return self._beside

    def _tell(
        self,
        state: State,
        tokens: int,
        topics: dict[str, Any],
        timeout: float,
        ring: int = -1,
        seed: int = 0,
    ) -> list[Told]:
        self._calls += 1
        if "which pass comes next" in topics:
            topics["which pass comes next"] = (self._calls, topics["which pass comes next"])
        mine = Told.about(state, tokens, ring, seed, topics)
        told = self.run(lambda: self._gather(mine, timeout))
        raised = [rank for rank, other in enumerate(told) if other.state == State.RAISED]
        if raised:
            raise RingError(
                f"{_ranks(raised)} raised an error before the call, see what they say; this is rank "
                f"{self.rank}"
            )
        for index, topic in enumerate(_TOPICS):
            said = [other.hashes[index] for other in told]
            differ = [rank for rank in range(self.size) if said[rank] != said[self.rank]]
            if differ:
                agree = [rank for rank in range(self.size) if rank not in differ]
                raise RingError(
                    f"ranks disagree about {topic}: {_ranks(agree)} say what this rank ({self.rank}) "
                    f"says, {_ranks(differ)} don't; all ranks have to make the same calls in the same "
                    "order"
                )
        return told

    def _gather(self, mine: Told, timeout: float) -> list[Told]:
        if self._post is None:
            self._post = Post(self._control(), _TAG)
        said = ring_gather(self._post, mine.pack(), timeout)
        told = [Told.unpack(packed) for packed in said]
        damaged = [rank for rank, other in enumerate(told) if other is None]
        if damaged:
            raise RingError(f"what {_ranks(damaged)} said before the call was damaged on its way")
        return told

    def _check_tokens(self, problem: Problem, held: list[int]) -> None:
        held_by = shard_ranges(problem.shards, problem.tokens, self.size, problem.pattern)
        expected = [sum(length for _, _, length in ranges) for ranges in held_by]
        for rank, (got, right) in enumerate(zip(held, expected)):
            if got != right:
                raise ValueError(
                    f"rank {rank} holds {got} tokens, expected {right}: {problem.shards} shards of "
                    f"{problem.tokens} tokens over {self.size} ranks; ring_positions says which"
                )


def _ranks(ranks: list[int]) -> str:
    some = ", ".join(str(rank) for rank in ranks[:8]) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some}"


def shard_ranges(
    shards: str, tokens: int, ranks: int, pattern: str | Dilated | None
) -> list[list[tuple[int, int, int]]]:
    """What each rank holds, as ``(first, step, length)``. Only balanced shards depend on a pattern."""
    return _shard_ranges(shards, tokens, ranks, pattern if shards == "balanced" else None)


@functools.lru_cache(maxsize=64)
def _shard_ranges(
    shards: str, tokens: int, ranks: int, pattern: str | Dilated | None
) -> list[list[tuple[int, int, int]]]:
    return ring_shards(shards, tokens, ranks, pattern)


_known: weakref.WeakKeyDictionary[ProcessGroup, Ranks] = weakref.WeakKeyDictionary()
_known_lock = threading.Lock()


def _backends(group: ProcessGroup) -> dict[str, str]:
    """The backend of a group for each type of device."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def travels(group: ProcessGroup, device: torch.device) -> bool:
    """Whether tensors of a device go through a group: through Gloo, or NCCL for CUDA devices."""
    return _backends(group).get(device.type) == ("gloo" if device.type == "cpu" else "nccl")


def ranks_of(group: ProcessGroup | None) -> tuple[ProcessGroup, Ranks]:
    """A group that messages can go through, and its ranks."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "there is no process group: call torch.distributed.init_process_group(\"gloo\") first, in "
            "every process that torchrun starts"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group is {group!r}, expected a process group that this rank is a member of: only members "
            "call ring_attention"
        )
    if not travels(group, torch.device("cuda")):
        check_backend(group, torch.device("cpu"))
    with _known_lock:
        if group not in _known:
            _known[group] = Ranks(group)
        return group, _known[group]


def check_backend(group: ProcessGroup, device: torch.device) -> None:
    """Refuses a device whose tensors don't go through a group."""
    if travels(group, device):
        return
    backend = _backends(group).get(device.type)
    has = "no backend" if backend is None else f"the backend {backend}"
    if device.type == "cpu":
        raise ValueError(
            f"the process group has {has} for tensors on the CPU, expected gloo: make a group with "
            "torch.distributed.new_group(backend=\"gloo\") beside it, and give it as group"
        )
    raise ValueError(
        f"the process group has {has} for tensors on {device}, expected nccl: make one with "
        "torch.distributed.init_process_group(\"cpu:gloo,cuda:nccl\")"
    )
