"""Import torch and meshwright.distributed once in the fork server for all workers, and start no threads.

The server ignores signals that are often sent to every process of a command (by ``timeout``, systemd, PBS, a terminal
that closes): it reports the workers' ends to the launcher, and without the server they all count as dead. Its workers
answer these signals as before; a signal that comes while a worker is being forked waits until then.
"""

import os
import signal

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel  # noqa: F401

import meshwright.distributed.parallelize  # noqa: F401
from meshwright.core.torch_private import import_compiler

import_compiler()  # fully_shard and the optimizers do so at first use

_SERVER = os.getpid()
_BEFORE = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}


def _hold_back() -> None:
    if os.getpid() == _SERVER:
        signal.pthread_sigmask(signal.SIG_BLOCK, _BEFORE)


def _let_through() -> None:
    if os.getpid() == _SERVER:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BEFORE)


def _answer_again() -> None:
    if os.getppid() == _SERVER:  # not in processes that a worker forks
        for number, disposition in _BEFORE.items():
            signal.signal(number, disposition)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BEFORE)


os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_answer_again)
