"""A ring whose tensors are on a device: the schedule of the compiled part, executed by an engine's calls.

What a rank sends, receives and computes in which step is decided where it is for rings on the CPU
(``crates/ring``); the compiled part's own loop moves bytes of the host, so this one is for tensors:

    due = []
    for step in steps:
        post sends and receives             results were computed in the step before
        compute due                         while messages are in flight
        wait for the messages
        due = work of the step

Partials are joined in f32. An engine that returns them in the type of its inputs (FlexAttention) rounds once per
hop, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan._longspan import RingSchedule
from longspan.torch._device_engine import DeviceEngine
from longspan.torch._partials import sink_gradient
from longspan.torch._pass_watch import PassWatch
from longspan.torch._ring_pass import Backward, Forward, Part, Pass, rank_plan
from longspan.torch._run import Found, Scores
from longspan.torch._transfers import Transfer, Transfers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: ``(label, sends, receives, work)``.
Step = tuple[int, "list[tuple[int, list[Part]]]", "list[tuple[int, list[Part]]]", "list[Part]"]


class DeviceRing:
    """A ring of the ranks of a group on one kind of problem, as ``HostRing`` is for tensors of the CPU."""

    def __init__(
        self,
        schedule: RingSchedule,
        engine: DeviceEngine,
        device: torch.device,
        transfers: Transfers,
        notices: tuple[Callable[[], ProcessGroup], int],
        timeout: float,
    ):
        """``notices`` are the group and the tag of what ranks tell each other about a pass; a ring holds on to
        no group."""
        self.engine, self.transfers, self.timeout = engine, transfers, timeout
        self._notices = notices
        self._passes = 0
        self._received = self._sent = 0
        self.forward_steps: list[Step] = schedule.forward
        self.backward_steps: list[Step] = schedule.backward
        self.bytes_needed: tuple[int, int] = schedule.bytes_needed

        self._plan = rank_plan(schedule, engine, device)
        excluded = schedule.excluded_rows
        self._excluded: Tensor | None = None
        if excluded is not None:
            rows = torch.frombuffer(bytearray(excluded), dtype=torch.bool)
            self._excluded = rows.to(device)

    def traffic(self) -> tuple[int, int]:
        """Bytes that this rank has received and sent in passes."""
        return self._received, self._sent

    def forward(
        self, group: ProcessGroup, q: Tensor, k: Tensor, v: Tensor, scores: Scores, saves: bool
    ) -> Found:
        """Output and log-sum-exp of this rank's queries."""
        found = self.engine.empty(q, v, saves)
        work = Forward(self._plan, q, k, v, scores, saves)
        self._run(group, "the forward pass", self.forward_steps, work, self.bytes_needed[0])
        state = work.state
        if scores.sink_logits is not None:
            state = state.with_sinks(scores.sink_logits)
            if self._excluded is not None:
                excluded = self._excluded.view(q.shape[0], 1, -1)
                state.lse.masked_fill_(excluded, -torch.inf)
        lse, lse_lo = state.rounded_lse()
        return Found(found.out.copy_(state.out), lse, lse_lo if saves else None)

    def backward(
        self,
        group: ProcessGroup,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        found: Found,
        dout: Tensor | None,
        dlse: Tensor | None,
        scores: Scores,
        wanted: Sequence[bool],
    ) -> tuple[Tensor, ...]:
        """Gradients of this rank's tokens, and what it contributes to that of sink logits."""
        dout = torch.zeros_like(found.out) if dout is None else dout
        if dlse is not None:
            # Rows that have nothing, padding beside sinks above all, have no gradients.
            dlse = dlse.masked_fill(found.lse == -torch.inf, 0)
        lse = found.lse.double() + found.lse_lo
        work = Backward(self._plan, q, k, v, (found.out, lse, dout, dlse), scores)
        self._run(group, "the backward pass", self.backward_steps, work, self.bytes_needed[1])
        gradients = [
            self.engine.empty_gradient(x).copy_(sums) for x, sums in zip((q, k, v), work.sums)
        ]
        learned = [found.lse.new_empty((0,))] * 3
        if scores.sink_logits is not None and wanted[0]:
            learned[0] = sink_gradient(scores.sink_logits, found.out, lse, dout, dlse)
        return (*gradients, *learned)

    def _run(
        self, group: ProcessGroup, name: str, steps: list[Step], work: Pass, needed: int
    ) -> None:
        self._passes += 1
        control, tag = self._notices
        watch = PassWatch(control(), tag, self._passes, name, self.timeout)
        try:
            received = self._execute(group, watch, steps, work)
            assert received == needed, f"received {received} bytes, expected {needed}"
            watch.end()
        except BaseException as error:
            watch.abort(error)
            raise

    def _execute(
        self, group: ProcessGroup, watch: PassWatch, steps: list[Step], work: Pass
    ) -> int:
        received, due = 0, []
        for label, sends, receives, next_due in steps:
            parts: list[tuple[Part, Transfer]] = []
            for way, messages in (("to", sends), ("from", receives)):
                for peer, some in messages:
                    for part in some:
                        tensor = work.send(part) if way == "to" else work.room(part)
                        assert tensor.nbytes == part[4], f"{part} has {tensor.nbytes} bytes"
                        parts.append((part, Transfer(way, peer, tensor)))
            # Parts of a message stay in their order.
            parts.sort(key=lambda pair: pair[1].peer)
            posted = self.transfers.post(group, watch, [transfer for _, transfer in parts])
            for part in due:
                work.compute(part)
            self.transfers.wait(watch, posted, f"the messages of step {label}")
            for part, (way, _, tensor) in parts:
                if way == "from":
                    work.keep(part, tensor)
                    received += tensor.nbytes
                else:
                    self._sent += tensor.nbytes
            due = next_due
        for part in due:
            work.compute(part)
        self._received += received
        return received
