"""What the ranks of a group tell each other about a pass while it runs, beside its messages.

Messages of a device are bare tensors: nothing in them says that a rank has failed, and a GPU waits for one that
never comes. So each pass has a notice from every rank to every other, over a group for the CPU (Gloo): that it
has reached the end, or that it gives up, and why. All are awaited from the start of the pass:

    start     receive a notice of every other rank
    hops      a notice that a rank gave up, or a broken connection, ends the pass here too
    end       tell every other rank, wait for every notice

A rank that is killed closes its connections, which all others see at once; one that stands still is late with a
message or with its notice, which costs the timeout once. Whoever fails tells the others, so that a rank that
waits for another one does not have to wait for as long once more.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, NoReturn

import torch

from longspan import RingError
from longspan.torch._post import InFlight, Message, said

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DONE, _GAVE_UP = 1, 2
#: State and number of the pass, then text.
_HEADER = struct.Struct("<II")
_LENGTH = 256
#: How long a rank that fails waits until the others have been told.
_ABORT_WAIT = 0.5


class PassWatch:
    """The notices of one pass, and its messages where the host waits for them."""

    def __init__(self, group: ProcessGroup, tag: int, number: int, name: str, timeout: float):
        self._group, self._tag, self._number = group, tag, number
        self.name, self.timeout = name, timeout
        self._others = [rank for rank in range(group.size()) if rank != group.rank()]
        self._flight = InFlight()
        self._notices: list[Message] = []
        for rank in self._others:
            notice = Message("from", rank, torch.zeros(_LENGTH, dtype=torch.uint8))
            self._notices.append(notice)
            self._flight.add(notice, group.recv, tag)

    def follow(self, message: Message) -> None:
        """Notices when a message ends that has begun."""
        self._flight.follow(message)

    def check(self) -> None:
        """Raises where the pass has failed."""
        for notice in self._notices:
            if notice.arrived:
                state, number, text = self._read(notice)
                if state == _GAVE_UP:
                    raise RingError(f"rank {notice.rank} gave up: {text}; in {self.name}")
                if (state, number) != (_DONE, self._number):
                    raise RingError(
                        f"rank {notice.rank} is at pass {number} of this ring, expected pass {self._number}; in "
                        f"{self.name}"
                    )
        failed = self._flight.failed
        if failed is not None:
            raise RingError(f"rank {failed.rank} is gone: {said(failed.error)}; in {self.name}")

    def fail(self, error: Exception) -> NoReturn:
        """Raises for messages that could not be posted, by the name of who failed where that is known soon."""
        self._flight.wait(_ABORT_WAIT, self._is_over)
        self.check()
        raise RingError(f"messages could not be posted: {said(error)}; in {self.name}") from error

    def wait(self, messages: list[Message], what: str) -> None:
        """Until messages are there and have left."""
        start = time.monotonic()
        self._flight.wait(self.timeout, lambda: self._is_over() or all(x.done for x in messages))
        self.check()
        late = [message for message in messages if not message.done]
        if late:
            waited = f"timed out after {time.monotonic() - start:.1f} s"
            from_, to = (sorted({x.rank for x in late if x.way == way}) for way in ("from", "to"))
            ways = [f"no message from ranks {from_}"] if from_ else []
            ways += [f"messages to ranks {to} not received"] if to else []
            raise RingError(f"{waited}: {' and '.join(ways)}; in {self.name}, waiting for {what}")

    def end(self) -> None:
        """Tells all ranks that this one has reached the end, and waits until all have."""
        told = self._tell(_DONE, "")
        self.wait([*self._notices, *told], "the end of the pass")

    def abort(self, error: BaseException) -> None:
        """Tells all ranks that this one has failed, as far as they can be reached."""
        told = self._tell(_GAVE_UP, str(error) or type(error).__name__)
        self._flight.wait(_ABORT_WAIT, lambda: all(message.done for message in told))

    def _is_over(self) -> bool:
        """Whether the pass has failed; the lock is held."""
        gave_up = (x.arrived and self._read(x)[0] != _DONE for x in self._notices)
        return self._flight.failed is not None or any(gave_up)

    def _tell(self, state: int, text: str) -> list[Message]:
        packed = _HEADER.pack(state, self._number) + text.encode()[: _LENGTH - _HEADER.size]
        sent = []
        for rank in self._others:
            notice = torch.frombuffer(bytearray(packed.ljust(_LENGTH, b"\0")), dtype=torch.uint8)
            sent.append(Message("to", rank, notice))
            self._flight.add(sent[-1], self._group.send, self._tag)
        return sent

    @staticmethod
    def _read(notice: Message) -> tuple[int, int, str]:
        packed = bytes(notice.tensor.tolist())
        text = packed[_HEADER.size :].rstrip(b"\0").decode(errors="ignore")
        return (*_HEADER.unpack(packed[: _HEADER.size]), text)
