"""The true peak of a run, by the kernel's account and by looking."""

import time

import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.profiling import memory

MIB = 2**20
HELD_S = 0.25  # Long enough that who looks every few milliseconds sees it, also on a machine with other work to do.


def _take(mebibytes):
    """Takes memory, holds it for a while, and gives it back."""
    taken = np.ones(mebibytes * MIB // 8)
    time.sleep(HELD_S)
    return float(taken.sum())


@pytest.mark.parametrize("by_kernel", [True, False], ids=["by the kernel", "by looking"])
def test_a_peak_is_what_is_held_at_once_above_what_was_there(by_kernel, monkeypatch):
    if not by_kernel:
        monkeypatch.setattr(memory, "_kernel_keeps_peak", lambda: False)
    there = np.ones(64 * MIB // 8)

    def run():
        _take(128)
        return _take(96)

    result, peak_bytes = memory.measure_host_peak(run)
    assert result == 96 * MIB / 8
    assert 120 * MIB < peak_bytes < 140 * MIB
    assert there.size


def test_an_earlier_and_larger_run_leaves_no_trace():
    memory.measure_host_peak(lambda: _take(256))
    assert memory.measure_host_peak(lambda: _take(32))[1] < 64 * MIB


def test_a_run_that_raises_leaves_no_thread_behind(monkeypatch):
    monkeypatch.setattr(memory, "_kernel_keeps_peak", lambda: False)
    with pytest.raises(ZeroDivisionError):
        memory.measure_host_peak(lambda: 1 / 0)


def test_a_cpu_keeps_no_account_of_its_own():
    jnp.ones(3)
    assert memory.device_peak_bytes() is None
