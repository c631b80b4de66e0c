"""Signals become flags; the second Ctrl-C does not wait."""

import os
import signal
import threading

import pytest

from softcell.engine.session import Interrupt, exit_code


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_only_remembered(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert interrupt.signal == 0
        send(number)
        assert interrupt.signal == number
        assert exit_code(interrupt.signal) == code
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_sigint_raises_at_once(first: int) -> None:
    with Interrupt():
        send(first)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_sigterm_changes_nothing() -> None:
    with Interrupt() as interrupt:
        send(signal.SIGINT)
        send(signal.SIGTERM)
    assert interrupt.signal == signal.SIGINT


def test_outside_the_main_thread_nothing_is_caught() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def body() -> None:
        with Interrupt() as interrupt:
            seen.extend([interrupt.signal, signal.getsignal(signal.SIGINT)])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [0, before]
