"""Send activations and gradients between the ranks of the pipeline axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.errors import MeshwrightError
from meshwright.planning.pipeline.plan import PipelinePlan
from meshwright.planning.pipeline.schedules.program import Content, Message

sends_complete: ContextVar[bool] = ContextVar("sends_complete", default=False)
"""Whether messages count as sent at once. Where peers are absent their works never say so: as gloo's, unlike NCCL's."""


class StageLost(MeshwrightError):
    """Raised if a message was not received or not taken: another rank ended, or does not answer."""

    is_echo = True


class Mail:
    """Sends and receives messages of one rank without waiting for them.

    Args:
        group: process group of the pipeline axis.
        plan: the pipeline, whose stages are named in errors.
    """

    def __init__(self, group: dist.ProcessGroup, plan: PipelinePlan):
        self.group, self.plan = group, plan
        self._sent: list[tuple[dist.Work, Tensor, int]] = []
        self._coming: dict[Message, tuple[dist.Work | None, Tensor, int]] = {}

    def send(self, message: Message, peer: int, tensor: Tensor) -> None:
        """Begin to send a tensor. Raises StageLost: the receiving rank is gone."""
        tensor = tensor.detach().contiguous()
        if sends_complete.get():
            self._sent.clear()
        self._sent = [(other, kept, to) for other, kept, to in self._sent if not other.is_completed()]
        with self._losses(lambda: self._untaken(peer)):
            work = dist.isend(tensor, group=self.group, group_dst=peer, tag=_tag(message))
        assert work is not None  # this rank is in the group
        self._sent.append((work, tensor, peer))

    def receive(self, message: Message, peer: int, room: Tensor) -> None:
        """Begin to receive into ``room``. Raises StageLost: the sending rank is gone."""
        with self._losses(lambda: self._not_given(message, peer)):
            work = dist.irecv(room, group=self.group, group_src=peer, tag=_tag(message))
        self._coming[message] = work, room, peer

    def hand_over(self, message: Message, tensor: Tensor) -> None:
        """Pass a tensor to another stage on this rank."""
        self._coming[message] = None, tensor.detach(), dist.get_rank(self.group)

    def take(self, message: Message) -> Tensor:
        """Wait for a message and return its tensor.

        Raises:
            StageLost: the sending rank is gone or silent.
        """
        work, tensor, peer = self._coming.pop(message)
        if work is not None:
            with self._losses(lambda: self._not_given(message, peer)):
                work.wait()
        return tensor

    def finish(self) -> None:
        """Wait until all messages are sent. Raises StageLost: a receiving rank is gone or silent."""
        for work, _, peer in self._sent:
            with self._losses(partial(self._untaken, peer)):
                work.wait()
        self._sent.clear()

    def forget(self) -> None:
        """Drop all pending messages after an error."""
        self._sent.clear()
        self._coming.clear()

    @contextmanager
    def _losses(self, describe: Callable[[], str]) -> Iterator[None]:
        """Turn torch's error for a lost connection into ``StageLost``."""
        try:
            yield
        except RuntimeError as error:
            why = str(error).strip().split("\n")[0]
            raise StageLost(
                f"{describe()}: its process ended, or does not answer ({why}). Look at what that rank said last."
            ) from error

    def _not_given(self, message: Message, peer: int) -> str:
        stage = message.stage - 1 if message.content is Content.ACTIVATION else message.stage + 1
        blocks = self.plan.stages[stage].blocks
        where = f"stage {stage} ({blocks[0]} to {blocks[-1]}, on {self._name(peer)})"
        return f"{where} sent no {message.content} of microbatch {message.microbatch}"

    def _untaken(self, peer: int) -> str:
        return f"{self._name(peer)} ({self.plan.part_of(peer)}) accepted no further message"

    def _name(self, peer: int) -> str:
        return f"rank {dist.get_global_rank(self.group, peer)}"


def _tag(message: Message) -> int:
    """Return a tag by which gloo tells messages apart; NCCL ignores it, and matches messages by their order."""
    return (message.microbatch << 12) | (message.stage << 1) | (message.content is Content.GRADIENT)


def broadcast_object(tensor: Tensor | None, source: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Broadcast a tensor of the rank ``source`` to all ranks of a group."""
    box = [None if tensor is None else (tuple(tensor.shape), tensor.dtype)]
    dist.broadcast_object_list(box, group_src=source, group=group, device=device)
    assert box[0] is not None
    shape, dtype = box[0]
    tensor = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.detach().contiguous()
    dist.broadcast(tensor, group_src=source, group=group)
    return tensor
