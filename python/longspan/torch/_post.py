"""Messages to and from the other ranks of a process group.

The compiled part calls a ``Post``: ``start`` some messages, then ``wait`` for all of them, and
``failed`` while it computes. Messages lie in memory of the compiled part; tensors that share it are
what torch is given. When a hop has failed, it has ranks ``tell`` each other why, with another tag.

What is done about Gloo, whose works have no way to ask whether they are done:

- A wait that runs into its timeout closes *every* connection of the group, and the other ranks see
  this one break away. So works are waited for without an end, each by a thread of its own, and the
  caller waits for these threads with its deadline. The connections still stand after it, and this
  rank can tell the others why it gives up.
- The caller waits in Python, where Ctrl-C arrives.
- A message that is longer than what its receiver expects ends the receiver's process. Ranks agree
  on everything that lengths follow from before they send one (``_ranks.py``); and each ring has a
  tag of its own, so that what a failed one has left is never taken for another's.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import re
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Longer than any call.
_EVER = timedelta(days=365)
#: How long a process that ends waits for its threads.
_GOODBYE = 1.0
#: From the tag of a post's hops to that of what is told when one has failed.
_ABORT_TAG = 0x1_0000


class Place(NamedTuple):
    """A message in the compiled part's memory."""

    rank: int
    address: int
    length: int

    def tensor(self) -> torch.Tensor:
        memory = (ctypes.c_uint8 * self.length).from_address(self.address)
        return torch.frombuffer(memory, dtype=torch.uint8)


class Post:
    """One rank's messages, those of one hop at a time."""

    def __init__(self, group: ProcessGroup, tag: int):
        self.rank, self.size = group.rank(), group.size()
        self._group, self._tag = weakref.ref(group), tag
        self._hop: InFlight | None = None
        self._abort = InFlight()

    def start(self, sends: list[tuple[int, int, int]], receives: list[tuple[int, int, int]]) -> None:
        """Starts messages, given as ``(rank, address, length)``."""
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process group is gone, expected it to live as long as its rings: call "
                "destroy_process_group after the last backward pass"
            )
        self._hop = InFlight()
        for place in map(Place._make, receives):
            self._hop.add(Message("from", place.rank, place.tensor()), group.recv, self._tag)
        for place in map(Place._make, sends):
            self._hop.add(Message("to", place.rank, place.tensor()), group.send, self._tag)

    def failed(self) -> bool:
        """Whether a message of this hop has failed already."""
        return self._hop is not None and self._hop.failed is not None

    def wait(self, timeout: float) -> tuple[Any, ...] | None:
        """None once all messages are done; else ``("gone", rank, why)``, or after so many seconds
        ``("late", ranks that sent nothing, ranks that took nothing, seconds)``."""
        hop, start = self._hop, time.monotonic()
        hop.wait(timeout, lambda: hop.failed is not None or not hop.open())
        with hop.changed:
            failed, late = hop.failed, hop.open()
        if failed is not None:
            return "gone", failed.rank, said(failed.error)
        if late:
            from_, to = ([x.rank for x in late if x.way == way] for way in ("from", "to"))
            return "late", from_, to, time.monotonic() - start
        return None

    def tell(self, what: bytes) -> None:
        """Tells every other rank the same, and listens to what they tell. Once, after a hop that has
        failed: the messages of that one may still be on their way."""
        group, tag = self._group(), self._tag + _ABORT_TAG
        if group is None:
            return
        for rank in (rank for rank in range(self.size) if rank != self.rank):
            coming = torch.zeros(len(what), dtype=torch.uint8)
            self._abort.add(Message("from", rank, coming), group.recv, tag)
            leaving = torch.frombuffer(bytearray(what), dtype=torch.uint8)
            self._abort.add(Message("to", rank, leaving), group.send, tag)

    def heard(self, timeout: float) -> tuple[int, bytes] | None:
        """What another rank tells, each once; None after so many seconds, or if no other rank will."""
        hop = self._abort
        coming = [message for message in hop.messages if message.way == "from"]
        hop.wait(timeout, lambda: any(x.arrived for x in coming) or all(x.done for x in coming))
        for message in coming:
            if message.arrived:
                message.arrived = False
                return message.rank, bytes(message.tensor.tolist())
        return None

    def told(self, timeout: float) -> None:
        """Waits until those that have told something have been told too, at most for so long."""
        hop = self._abort
        spoken = {x.rank for x in hop.messages if x.way == "from" and x.done}
        leaving = [x for x in hop.messages if x.way == "to" and x.rank in spoken]
        hop.wait(timeout, lambda: all(message.done for message in leaving))


def said(error: BaseException) -> str:
    """What Gloo says, without the line of its sources and without advice."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).split(". This is typically")[0]


class Message:
    """A message on its way."""

    def __init__(self, way: str, rank: int, tensor: torch.Tensor):
        self.way, self.rank, self.tensor = way, rank, tensor
        self.work: Any = None
        self.done = False
        #: Completed, and not yet read.
        self.arrived = False
        self.error: BaseException | None = None


class InFlight:
    """Messages that travel at the same time."""

    def __init__(self):
        self.messages: list[Message] = []
        self.failed: Message | None = None
        self.changed = threading.Condition()

    def open(self) -> list[Message]:
        return [message for message in self.messages if not message.done]

    def wait(self, timeout: float, enough: Callable[[], bool]) -> None:
        """Until it is enough, or so many seconds are over."""
        end = time.monotonic() + timeout
        with self.changed:
            while not enough() and (left := end - time.monotonic()) > 0:
                self.changed.wait(min(left, 3600.0))

    def add(self, message: Message, begin: Any, tag: int) -> None:
        """Begins a message."""
        self.messages.append(message)
        _travelling.add(message)
        try:
            message.work = begin([message.tensor], message.rank, tag)
        except Exception as error:
            self._end(message, error)
        else:
            _waiters.wait(message, self._end)

    def follow(self, message: Message) -> None:
        """Waits for a message that has begun, which the caller keeps."""
        _travelling.add(message)
        _waiters.wait(message, self._end)

    def _end(self, message: Message, error: BaseException | None) -> None:
        with self.changed:
            message.done, message.arrived, message.error = True, error is None, error
            _travelling.discard(message)
            if error is not None and self.failed is None:
                self.failed = message
            self.changed.notify()


class _Waiters:
    """Threads that wait for works, one each, used again and again."""

    def __init__(self):
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def wait(self, message: Message, end: Any) -> None:
        """Calls ``end`` with the message and what was wrong with it, from another thread."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._run, name="longspan-post", daemon=True).start()
        self._jobs.put((message, end))

    def _run(self) -> None:
        while True:
            message, end = self._jobs.get()
            error: BaseException | None = None
            try:
                if message.work.wait(_EVER) is False:
                    error = RuntimeError("the message was called off")
            except Exception as raised:
                error = raised
            # Before the caller goes on, who would start another thread.
            with self._lock:
                self._idle += 1
            end(message, error)
            message = end = error = None


_waiters = _Waiters()
#: Requests that aren't complete, also after a timeout: torch may be using their memory.
_travelling: set[Message] = set()
_parents: list[set[Message]] = []


def _after_fork() -> None:
    """A child has none of its parent's threads. Its messages aren't the child's to end."""
    global _waiters, _travelling
    _parents.append(_travelling)
    _waiters, _travelling = _Waiters(), set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _let_go() -> None:
    """Ends the threads that wait for what never came: one that wakes up while the interpreter ends
    would end the process by a signal. A timeout closes the group's connections for all waiting threads."""
    for message in list(_travelling):
        if not message.done:
            try:
                message.work.wait(timedelta(milliseconds=1))
            except Exception:
                pass
    end = time.monotonic() + _GOODBYE
    while _travelling and time.monotonic() < end:
        time.sleep(0.01)
