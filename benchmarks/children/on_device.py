"""The child of ``on_device.py``: the only process that starts the accelerator.

Runs as ``python -m benchmarks.children.on_device``. A TPU belongs to one process at a time, so the parent has none.
"""

from typing import Any

import jax

from benchmarks.children import measure_kernels, measure_programs
from pegprof.measure.worker import main
from pegprof.measure.worker.environment import find_environment
from pegprof.measure.worker.main import Job, Reporter
from pegprof.targets.chips import find_chip, name_of_kind
from pegprof.versions import version_of

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def describe_device(request: dict[str, Any], reporter: Reporter) -> None:
    """What is here, whose kernels a plan takes for it, and the versions of everything."""
    found, device = find_environment(), jax.devices()[0]
    known = name_of_kind(device.device_kind)
    planned_as = known or getattr(find_chip(found.backend), "name", None)
    on_gpu = found.backend == "gpu"
    reporter.update(
        backend=found.backend,
        device_kind=found.device_kind,
        known_chip=known,
        chip=planned_as,
        runtime=" ".join(str(device.client.platform_version).split()),
        jax=found.jax,
        jaxlib=found.jaxlib,
        libtpu=version_of("libtpu") if found.backend == "tpu" else None,
        cuda_plugin=next(filter(None, map(version_of, PLUGINS)), None) if on_gpu else None,
        matmul_precision=found.matmul_precision,
        xla_flags=found.xla_flags,
        libtpu_init_args=found.libtpu_init_args,
    )


JOBS: dict[str, Job] = {
    "describe_device": describe_device,
    "describe_model": measure_programs.describe_model,
    "measure_kernel": measure_kernels.measure_kernel,
    "time_programs": measure_programs.time_programs,
    "measure_memory": measure_programs.measure_memory,
}

if __name__ == "__main__":
    main.serve(JOBS.__getitem__)
