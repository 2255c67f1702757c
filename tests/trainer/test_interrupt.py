"""Signals end a run between two steps, on all ranks at the same one."""

import os
import signal
import time
from pathlib import Path

import interrupt_work
import pytest
import torch
from ranks import fork_ranks

from opendm.errors import DataError, Interrupted
from opendm.trainer.interrupt import SIGNALS, StopRequest

CPU = torch.device("cpu")


def send(signum):
    os.kill(os.getpid(), signum)


@pytest.fixture(autouse=True)
def handlers_are_put_back():
    before = [signal.getsignal(signum) for signum in SIGNALS]
    yield
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_is_remembered_until_the_step_ends(signum):
    with StopRequest() as stop:
        stop.finish_steps(CPU)
        assert not stop.agreed(CPU)
        send(signum)
        assert stop.agreed(CPU)
        with pytest.raises(Interrupted, match=f"{signum.name} after saving checkpoint-7") as caught:
            stop.stop("checkpoint-7")
        assert caught.value.exit_code == 75


@pytest.mark.parametrize("signum", SIGNALS)
def test_before_the_first_step_a_signal_stops_the_run_at_once(signum):
    def start():
        with StopRequest():
            send(signum)
            time.sleep(5)
            pytest.fail("the signal was ignored")

    with pytest.raises(Interrupted, match=f"{signum.name} before the first step"):
        start()


def test_further_signals_change_nothing_and_a_second_ctrl_c_stops_at_once():
    with StopRequest() as stop:
        stop.finish_steps(CPU)
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            send(signum)
        assert stop.asked_by is signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_the_first_ctrl_c_says_what_a_second_one_does(capfd):
    for announce, expected in ((True, "once more"), (False, "")):
        with StopRequest(announce=announce) as stop:
            stop.finish_steps(CPU)
            send(signal.SIGINT)
        error = capfd.readouterr().err
        assert expected in error
        assert bool(error) == announce


def test_a_signal_that_start_up_code_swallowed_still_stops_the_run():
    with StopRequest() as stop:
        with pytest.raises(Interrupted):
            send(signal.SIGTERM)
        with pytest.raises(Interrupted):
            stop.finish_steps(CPU)


def test_the_connection_that_a_signal_cost_is_not_reported_as_a_failure():
    def lose(error, *, in_steps):
        with StopRequest() as stop:
            if in_steps:
                stop.finish_steps(CPU)
                send(signal.SIGTERM)
            else:
                with pytest.raises(Interrupted):
                    send(signal.SIGTERM)
            raise error

    with pytest.raises(Interrupted):
        lose(RuntimeError("Connection closed by peer"), in_steps=False)
    with pytest.raises(DataError):  # what a person must mend
        lose(DataError("no such frame"), in_steps=False)
    with pytest.raises(RuntimeError, match="peer"):  # nothing was saved: not safe to start again
        lose(RuntimeError("Connection closed by peer"), in_steps=True)


def test_nohup_keeps_its_meaning():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            send(signal.SIGHUP)
            assert stop.asked_by is None
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize(("signalled", "at_step"), [(0, 0), (1, 3)])
def test_one_ranks_signal_stops_all_ranks_at_the_same_step(tmp_path, signalled, at_step):
    outcomes = fork_ranks(
        interrupt_work.stop_one_rank, signalled, at_step, tmp_path=tmp_path, world_size=3
    )
    assert outcomes == [(at_step, "SIGTERM")] * 3


def test_loader_workers_outlive_signals_to_the_group_and_end_with_their_rank(tmp_path):
    (with_protection, without, left) = fork_ranks(
        interrupt_work.signal_loaders, tmp_path=tmp_path, world_size=1
    )[0]
    assert with_protection == "12 SIGTERM"
    assert without == "lost a worker"
    end_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in left) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert len(left) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)
