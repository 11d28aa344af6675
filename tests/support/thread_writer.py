"""Write a save on a thread of this process instead of in one of its own, where tests can reach it."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from unittest.mock import patch

from meshwright.checkpoint import background
from meshwright.checkpoint.writer import Writer


def start() -> tuple[socket.socket, None]:
    line, other = socket.socketpair()
    threading.Thread(target=Writer(other).serve, daemon=True).start()
    return line, None


@contextmanager
def on_a_thread():
    """In here, savers start their writers on threads."""
    with patch.object(background, "start_writer", start):
        yield
