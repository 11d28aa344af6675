"""A signal before the ranks meet: who was not told of it may already be gone."""

from __future__ import annotations

import signal

import pytest

from meshwright.distributed.process.workers import STORE
from meshwright.training.stopping import Interrupted, StopRequest


def test_a_signal_before_the_meeting_keeps_a_rank_from_waiting_for_those_who_died_of_it(monkeypatch):
    monkeypatch.delenv(STORE, raising=False)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Interrupted) as interrupted, stop.released():
            pytest.fail("went to the meeting")
        assert interrupted.value.number == signal.SIGUSR1
        signal.raise_signal(signal.SIGTERM)  # noted again afterwards, and does not end this process
        assert stop.signal == signal.SIGUSR1


def test_a_worker_goes_to_the_meeting_since_its_launcher_ends_it_when_another_is_lost(monkeypatch, tmp_path):
    monkeypatch.setenv(STORE, str(tmp_path / "store"))
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        with stop.released():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert stop.signal == signal.SIGTERM
