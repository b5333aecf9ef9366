"""Settings and fixtures for all tests. Tests run on the CPU, whatever else the machine has."""

import os
import signal
from collections.abc import Generator, Iterator

os.environ["JAX_PLATFORMS"] = "cpu"  # before the first import of jax

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts. To set this
# right in the child itself (preexec_fn) takes a real fork, of which JAX warns.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import pytest

# How long an example takes says something about the machine, and nothing about the code.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit mode, for tests of exactness."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def no_rank_promotion() -> Iterator[None]:
    """Broadcasting that adds axes is an error: our own code says which axes it means; a user's need not."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """In this process LLVM goes without its expensive passes, which takes half the time, unless ``full_compile`` asks
    for them. XLA's own passes and its assignment of buffers are the same either way: only the code is slower."""
    jax.config.update("jax_disable_most_optimizations", item.get_closest_marker("full_compile") is None)
    return (yield)
