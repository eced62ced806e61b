"""Messages of a device: the sends and receives of one step of a ring, as one batch of torch's.

Tensors are bare bytes without tags, which NCCL hasn't got: all ranks list the messages of a step in ascending
order of the peer and, per peer and direction, of the part, which both ranks know from their schedules.

On a CUDA device a batch is posted on a stream of its own before the step's computations are launched, and the
stream of the computations waits for it behind them; the host waits for neither. Elsewhere (Gloo) the host waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.torch._pass_watch import PassWatch
from longspan.torch._post import Message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Transfer(NamedTuple):
    """A tensor to or from another rank."""

    way: str
    """``"to"`` or ``"from"``."""
    peer: int
    tensor: Tensor


class Posted(NamedTuple):
    """Transfers in flight; they keep their tensors."""

    transfers: list[Transfer]
    messages: list[Message]
    event: torch.cuda.Event | None


class Transfers:
    """The device messages of a group."""

    def __init__(self, group: ProcessGroup, device: torch.device, tag: int):
        self._device, self._tag = device, tag
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # NCCL makes its communicator in the first call, which has to be all ranks'; a step is of some.
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def post(
        self, group: ProcessGroup, watch: PassWatch, transfers: list[Transfer]
    ) -> Posted | None:
        """Starts the transfers of a step, in the order given."""
        transfers = [transfer for transfer in transfers if transfer.tensor.numel()]
        if not transfers:
            return None
        operations = [
            dist.P2POp(
                dist.isend if way == "to" else dist.irecv,
                tensor,
                group=group,
                group_peer=peer,
                tag=self._tag,
            )
            for way, peer, tensor in transfers
        ]
        if self._stream is not None:
            return Posted(transfers, [], self._post_on_stream(self._stream, operations))
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            # A broken connection: the others' notices say whose.
            watch.fail(error)
        messages = [Message(*transfer) for transfer in transfers]
        for message, work in zip(messages, works):
            message.work = work
            watch.follow(message)
        return Posted(transfers, messages, None)

    def wait(self, watch: PassWatch, posted: Posted | None, what: str) -> None:
        """Has what follows wait for transfers: computations of the device, or the host."""
        if posted is None:
            watch.check()
        elif posted.event is None:
            watch.wait(posted.messages, what)
        else:
            watch.check()
            torch.cuda.current_stream(self._device).wait_event(posted.event)

    def _post_on_stream(
        self, stream: torch.cuda.Stream, operations: list[dist.P2POp]
    ) -> torch.cuda.Event:
        # What is sent was computed, and memory that is received into was last used, on the current stream.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for work in dist.batch_isend_irecv(operations):
                # Has this stream wait, not the host.
                work.wait()
            return stream.record_event()


def abort(group: ProcessGroup, device: torch.device) -> None:
    """Ends what a device still waits for from ranks that failed. The group can't be used after it."""
    if device.type == "cuda":
        group._get_backend(device).abort()
