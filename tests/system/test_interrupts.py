"""Signals that wait for the end of a block."""

import signal
import threading
import time

import pytest

from ssd_jax.system.interrupts import PATIENCE, Deferred


@pytest.fixture
def terms():
    """A Python handler of SIGTERM, and the signals that it saw."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def press(number=signal.SIGINT):
    signal.raise_signal(number)


def interrupted(block):
    """The interrupt that ended a block."""
    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    return caught.value


def handlers():
    return [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]


def test_an_interrupt_comes_when_the_block_has_ended():
    before, done = handlers(), []

    def block():
        with Deferred() as interrupts:
            press()
            done.append(interrupts.pending)
        done.append("never")

    assert interrupted(block)
    assert done == [True]
    assert handlers() == before


def test_every_signal_that_came_is_delivered_once(terms):
    def block():
        with Deferred():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                press(number)
            assert not terms

    assert interrupted(block)
    assert terms == [signal.SIGTERM]


def test_an_error_of_the_block_is_the_context_of_the_interrupt():
    def block():
        with Deferred():
            press()
            raise ValueError("of the block")

    assert isinstance(interrupted(block).__context__, ValueError)


def test_the_outer_of_two_blocks_delivers_the_interrupt():
    done = []

    def block():
        with Deferred() as outer:
            with Deferred() as inner:
                press()
            done.append(inner is outer)

    assert interrupted(block)
    assert done == [True]


def test_an_answered_interrupt_is_forgotten():
    with Deferred(signal.SIGINT) as interrupts:
        press()
        interrupts.clear()
    assert not interrupts.pending


def test_within_delivered_an_interrupt_comes_at_once_and_after_it_waits_again():
    with Deferred(signal.SIGINT) as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.immediate():
            press()
        press()
        assert interrupts.pending
        interrupts.clear()


@pytest.mark.parametrize(("third_at", "forced"), [(PATIENCE / 2, False), (PATIENCE * 2, True)])
def test_a_third_press_on_something_that_hangs_is_heard_at_once(third_at, forced):
    now, done, interrupts = [0.0], [], Deferred(clock=lambda: now[0])

    def block():
        with interrupts:
            press()
            now[0] = third_at
            for count in (2, 3):
                press()
                done.append(count)

    assert interrupted(block)
    assert done == ([2] if forced else [2, 3])


def test_signals_that_end_the_process_or_are_ignored_are_left_alone():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Deferred():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            press()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_the_block_has_set_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        with Deferred():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_put_back_whenever_an_interrupt_comes():
    before, ready = handlers(), threading.Event()

    def shoot():
        ready.wait()
        time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def go_on():
        ready.set()
        while True:
            with Deferred():
                pass

    for _ in range(20):
        thread = threading.Thread(target=shoot)
        thread.start()
        assert interrupted(go_on)
        thread.join()
        ready.clear()
        assert handlers() == before


def test_another_thread_is_left_alone():
    before, seen = handlers(), []

    def enter():
        with Deferred():
            seen.extend(handlers())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == before
