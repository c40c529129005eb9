"""A signal whose handler raises, at the very moment at which the hook holds signals back."""

import ctypes
import itertools
import signal

import pytest

from sglang_hook import client


class Told(Exception):
    pass


def test_signals_get_through_again_when_one_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(number: int, frame: object) -> None:
        raise Told

    before = signal.signal(signal.SIGUSR1, tell)
    # Sent while the set is read, by C code alone: Python handles it inside of pthread_sigmask.
    late = itertools.filterfalse(getattr(ctypes.CDLL(None), "raise"), [int(signal.SIGUSR1)])
    monkeypatch.setattr(client, "_SIGNALS", late)
    try:
        with pytest.raises(Told):
            client._undisturbed(lambda: pytest.fail("it was to be interrupted"))
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGUSR1, before)
