"""The true peak of a run, by the kernel's account and by looking.

This process also takes and frees memory of its own meanwhile. So values that must not be confused differ by 128 MiB at
least, and bounds lie in the middle.
"""

import ctypes
import resource
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.measure.worker import memory
from tests.waiting import wait_for

MIB = 2**20


def _take(mebibytes, hold=lambda: None):
    """Takes memory, holds it, and gives it back."""
    taken = np.ones(mebibytes * MIB // 8)
    hold()
    return float(taken.sum())


@pytest.fixture
def until_seen(monkeypatch):
    """Has the peak found by looking; returns what waits until somebody has looked."""
    looks, resident_bytes = [], memory.resident_bytes

    def look():
        looks.append(resident_bytes())
        return looks[-1]

    def hold():
        before = len(looks)
        wait_for(lambda: len(looks) >= before + 2)  # the first may have been under way already

    monkeypatch.setattr(memory, "resident_bytes", look)
    monkeypatch.setattr(memory, "_kernel_keeps_peak", lambda: False)
    return hold


def _assert_peak_is_what_is_held_at_once_above_what_was_there(**how):
    there = np.ones(128 * MIB // 8)

    def run():
        _take(256, **how)
        return _take(128, **how)

    result, peak_bytes = memory.measure_host_peak(run)
    assert result == 128 * MIB / 8
    assert 192 * MIB < peak_bytes < 320 * MIB  # neither the 128 of the end, nor 128 more that were there before
    assert there.size


@pytest.mark.skipif(not memory._kernel_keeps_peak(), reason="the kernel keeps no peak that can be reset")
def test_a_peak_is_what_is_held_at_once_by_the_kernels_account():
    _assert_peak_is_what_is_held_at_once_above_what_was_there()


def test_a_peak_is_what_is_held_at_once_by_looking(until_seen):
    _assert_peak_is_what_is_held_at_once_above_what_was_there(hold=until_seen)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_kept_for_the_next_run_and_costs_no_page_faults():
    with memory._eager_allocator():
        given_back = [_faults_of_a_block() for _ in range(3)][-1]
    memory.keep_freed()
    kept = [_faults_of_a_block() for _ in range(3)][-1]
    assert kept < 100 < 500 < given_back


def _faults_of_a_block(size=3 * MIB):
    """The page faults of writing to a block, which is freed then. NumPy asks for huge pages from 4 MiB on."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    np.empty(size, np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_an_earlier_and_larger_run_leaves_no_trace():
    memory.measure_host_peak(lambda: _take(256))
    assert memory.measure_host_peak(lambda: _take(32))[1] < 144 * MIB


@pytest.mark.usefixtures("until_seen")
def test_a_run_that_raises_leaves_no_thread_behind():
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        memory.measure_host_peak(lambda: 1 / 0)
    assert threading.active_count() == threads


def test_a_cpu_keeps_no_account_of_its_own():
    jnp.ones(3)
    assert memory.device_peak_bytes() is None


def _no_stats():
    raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: GetAllocatorStats")


@pytest.mark.parametrize("memory_stats", [lambda: None, dict, _no_stats])
def test_a_device_that_keeps_no_account_has_neither_peak_nor_limit(monkeypatch, memory_stats):
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(memory_stats=memory_stats)])
    assert (memory.device_peak_bytes(), memory.device_limit_bytes()) == (None, None)
