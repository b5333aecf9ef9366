"""A JAX plug-in for an accelerator that does not exist: the CPU does its work, and it keeps the accounts of a real one.

It stands in a folder of its own, which a test puts on the PYTHONPATH. There JAX finds it as it finds any plug-in, and
in the place of NVIDIA's, whose name it has: were both there, chance would decide which of them JAX believes.
``FAKE_DEVICE`` says in JSON what it is: the fields of ``tests.fake_device.FakeDevice``.

What is faked is what pegprof looks at: ``jax.default_backend``, a device's kind and its ``memory_stats``. Programs are
lowered and compiled for the CPU as ever, so that XLA's figures are those of what really runs.
"""

import fcntl
import json
import os
import signal
from pathlib import Path

import jax
from jax._src import hardware_utils, xla_bridge
from jaxlib import _jax

BACKENDS = {"cuda": "gpu", "tpu": "tpu"}  # what jax.default_backend calls a platform


def initialize():
    """Called by JAX when it looks for plug-ins. Nothing is taken before a backend is started."""
    fake = json.loads(os.environ["FAKE_DEVICE"])
    hardware_utils.has_visible_nvidia_gpu = lambda: True  # otherwise JAX passes over "cuda"
    xla_bridge.register_backend_factory(fake["platform"], lambda: start(fake), priority=500)


def start(fake):
    """The device, for the first process that asks for it. As long as that lives, all others are turned away."""
    ledger = Ledger(Path(fake["folder"]))
    ledger.take_ownership()
    ledger.write("started", preallocated_bytes=preallocated_bytes(fake["memory_bytes"]))
    client = xla_bridge.make_cpu_client()
    memory = Memory(client, fake["memory_bytes"], others_bytes=fake["others_bytes"])
    pretend(fake, client, memory)
    watch_runs(memory, ledger, deadly_bytes=fake["deadly_bytes"])
    return client


class Ledger:
    """What every process did with the device, in a file, a line each; and the lock of its owner."""

    def __init__(self, folder):
        self._lines, self._lock = folder / "ledger.jsonl", folder / "owner"

    def write(self, event, **more):
        with self._lines.open("a") as file:
            file.write(json.dumps({"event": event, "pid": os.getpid(), **more}) + "\n")

    def take_ownership(self):
        """The lock ends with the process, however that ends."""
        self._held = self._lock.open("a+")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = self._lock.read_text()
            self.write("turned away", owner=int(owner))
            raise RuntimeError(f"The TPU is already in use by process with pid {owner}.") from None
        self._lock.write_text(str(os.getpid()))


def preallocated_bytes(memory_bytes):
    """What XLA takes of a GPU at once, by the variables that it reads."""
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0"):
        return 0
    return int(memory_bytes * float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")))


class Memory:
    """The arrays that are there, and at a run what the program takes besides: its results and temporaries."""

    def __init__(self, client, limit_bytes, *, others_bytes):
        self._client, self._limit_bytes, self._others_bytes, self._peak_bytes = client, limit_bytes, others_bytes, 0

    def in_use(self):
        arrays = {x.unsafe_buffer_pointer(): x.nbytes for x in self._client.live_arrays()}  # two may share a buffer
        return sum(arrays.values())

    def take(self, more_bytes):
        in_use = self.in_use()
        if self._others_bytes + in_use + more_bytes > self._limit_bytes:
            raise jax.errors.JaxRuntimeError(
                f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {more_bytes} bytes."
            )
        self._peak_bytes = max(self._peak_bytes, in_use + more_bytes)

    def stats(self):
        in_use = self.in_use()
        self._peak_bytes = max(self._peak_bytes, in_use)
        return {"bytes_in_use": in_use, "peak_bytes_in_use": self._peak_bytes, "bytes_limit": self._limit_bytes}


def pretend(fake, client, memory):
    """The devices of this client say that they are the fake; those of another, such as JAX's own CPU, what they are."""
    kind, stats = _jax.Device.device_kind, _jax.Device.memory_stats

    def memory_stats(device):
        if device.client is not client:
            return stats(device)
        if fake["memory_stats"] == "raises":
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: GetAllocatorStats")
        return memory.stats() if fake["memory_stats"] == "kept" else None

    _jax.Device.device_kind = property(lambda device: fake["kind"] if device.client is client else kind.fget(device))
    _jax.Device.memory_stats = memory_stats
    jax.default_backend = lambda: BACKENDS[fake["platform"]]


def watch_runs(memory, ledger, *, deadly_bytes):
    """Every program that was compiled ahead of its run, as pegprof does, is put on the accounts when it runs."""
    run = jax.stages.Compiled.__call__

    def run_on_account(compiled, *args, **kwargs):
        sizes = compiled.memory_analysis()
        more_bytes = sizes.output_size_in_bytes + sizes.temp_size_in_bytes - sizes.alias_size_in_bytes
        memory.take(more_bytes)
        if deadly_bytes is not None and more_bytes >= deadly_bytes:
            ledger.write("died")
            os.kill(os.getpid(), signal.SIGKILL)
        return run(compiled, *args, **kwargs)

    jax.stages.Compiled.__call__ = run_on_account
