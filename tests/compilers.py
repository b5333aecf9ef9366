"""Tests that compile for TPUs and GPUs for real: where they run, and where they must.

XLA's compilers for them come as wheels, which the extra ``test`` installs wherever they exist: on Linux, x86-64. There
these tests always run, and where a wheel is missing all the same they FAIL: a continuous integration that skipped them
would prove nothing of targets. On every other system they are skipped, with the reason.
"""

import pytest

from pegprof.targets.compilers import has_wheels

needs_compilers = pytest.mark.skipif(
    not has_wheels(), reason="XLA's compilers for TPUs and GPUs have no wheels for this system, only for Linux, x86-64"
)
