"""The memory that a run really takes: the peak of this process above what it held before, or the device's own peak.

On Linux the kernel keeps the peak and resets it on request; elsewhere, and where that is forbidden, a thread looks
every few milliseconds. glibc keeps freed memory for later and so would make one run's peak a matter of those before it:
during a measurement it gives large blocks back at once.
"""

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

LOOK_S = 0.002
LONGEST_WAIT_S = 2.0
KEPT_BYTES = 64 * 2**20

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"

# mallopt's numbers for its parameters, and the largest values to which glibc raises them by itself.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_TRIM, _LARGEST_MMAP = 64 * 2**20, 32 * 2**20
_EAGER = 2**20

T = TypeVar("T")


def measure_host_peak(run: Callable[[], T]) -> tuple[T, int]:
    """What a function returns, and the most bytes that this process held meanwhile, above what it held before."""
    with _eager_allocator():
        give_back()
        return _measure_by_kernel(run) if _kernel_keeps_peak() else _measure_by_looking(run)


def give_back() -> None:
    """Returns what is not needed any more to the system."""
    gc.collect()
    _call_libc("malloc_trim", 0)


def resident_bytes() -> int:
    """What this process holds now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def wait_until_given_back(before_bytes: int) -> None:
    """Waits until this process holds no more than it did before a run, or nearly so.

    XLA frees its temporaries a moment after the results are there. Who runs next shall neither find them in its way,
    nor share the machine with their being freed. What a library keeps for the next run is not waited for.
    """
    deadline_s = time.monotonic() + LONGEST_WAIT_S
    while resident_bytes() > before_bytes + KEPT_BYTES and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)


def device_peak_bytes() -> int | None:
    """The most that was ever in use on the device by this process. None on a CPU, which keeps no account."""
    return _device_statistics().get("peak_bytes_in_use")


def device_limit_bytes() -> int | None:
    """What this process may use on the device; None where nobody knows."""
    return _device_statistics().get("bytes_limit")


def _device_statistics() -> dict[str, int]:
    """The device's own account. A plug-in may keep none, and say so by None or by an error: a run is good without."""
    try:
        return jax.local_devices()[0].memory_stats() or {}
    except jax.errors.JaxRuntimeError:
        return {}


def _kernel_keeps_peak() -> bool:
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        return _status_bytes("VmHWM") > 0
    except (OSError, KeyError):
        return False


def _measure_by_kernel(run: Callable[[], T]) -> tuple[T, int]:
    before = _status_bytes("VmRSS")
    _CLEAR_REFS.write_text(_RESET_PEAK)
    result = run()
    return result, max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def _measure_by_looking(run: Callable[[], T]) -> tuple[T, int]:
    over = threading.Event()
    before = peak = resident_bytes()

    def look() -> None:
        nonlocal peak
        while not over.wait(LOOK_S):
            peak = max(peak, resident_bytes())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        result = run()
    finally:
        over.set()
        thread.join()
    return result, max(peak, resident_bytes()) - before


def keep_freed() -> None:
    """Has glibc keep what is freed for the next run, as it comes to do in any process that runs for long.

    By itself it learns that from what it has seen freed, so one process had 5,000 page faults in every run of a
    program and the next had none: a run took 6.9 ms or 2.7 ms.
    """
    _call_libc("mallopt", _M_MMAP_THRESHOLD, _LARGEST_MMAP)
    _call_libc("mallopt", _M_TRIM_THRESHOLD, _LARGEST_TRIM)


@contextlib.contextmanager
def _eager_allocator() -> Iterator[None]:
    """glibc that gives back what is freed."""
    _call_libc("mallopt", _M_MMAP_THRESHOLD, _EAGER)
    _call_libc("mallopt", _M_TRIM_THRESHOLD, _EAGER)
    try:
        yield
    finally:
        keep_freed()


def _call_libc(name: str, *arguments: int) -> Any:
    """Nothing happens where the C library is not glibc and has no such function."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        return getattr(ctypes.CDLL(None), name)(*arguments)
