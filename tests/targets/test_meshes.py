"""Slices and meshes: what their names mean, what is sharded over which axis, what is refused."""

import dataclasses

import jax
import pytest

from pegprof.errors import ExitCode, PegprofError
from pegprof.measure.worker import shardings
from pegprof.report.terminal import render_terminal
from pegprof.result.result import Result, Traffic
from pegprof.targets import meshes, selection
from pegprof.targets.devices import find_device
from pegprof.targets.hlo.collectives import Collective
from tests.result.results import RESULT


@pytest.mark.parametrize(
    ("name", "count", "topology"),
    [
        ("tpu-v5p:4x4x4", 64, "v5p:4x4x4"),
        ("tpu-v5e:16x16", 256, "v5e:16x16"),
        ("tpu-v6e:8x8", 64, "v6e:8x8"),
        ("h100:8", 8, "1x1x8"),
        ("h100:8x4", 32, "1x8x4"),
    ],
)
def test_a_slice_has_its_devices(name, count, topology):
    device = find_device(name)
    assert (device.name, device.count) == (name, count)
    assert topology in device.topology.values()
    assert device.kind == name.partition(":")[0]
    assert selection.absent_target(device).backend == device.kind


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tpu-v5p:4x4", "is not a slice"),
        ("tpu-v5p:3x5x7", "not a whole number of hosts"),
        ("tpu-v5e:0x2", "is not a slice"),
        ("h100:2x2x2", "is not a slice"),
        ("h100:many", "is not a slice"),
        ("abacus:8", "unknown target"),
    ],
)
def test_a_slice_that_does_not_exist_is_refused_with_a_hint(name, words):
    with pytest.raises(PegprofError, match=words) as caught:
        find_device(name)
    assert caught.value.hint
    assert caught.value.exit_code == ExitCode.USAGE


def test_eight_virtual_devices_of_the_processor_are_run_on():
    target = selection.choose_target("cpu:8", selection.cpu_target())
    assert (target.count, target.runs, target.is_host, target.backend) == (8, True, True, "cpu")
    assert "--xla_force_host_platform_device_count=8" in target.environment["XLA_FLAGS"]
    with pytest.raises(PegprofError, match="is not a number of devices"):
        selection.choose_target("cpu:none", selection.cpu_target())


@pytest.mark.parametrize("text", ["dat=8", "data", "data=0", "data=2,data=4", "data=x", ""])
def test_what_is_no_mesh_is_refused_with_a_hint(text):
    with pytest.raises(PegprofError) as caught:
        meshes.parse_mesh(text)
    assert "data=16,fsdp=4" in caught.value.hint


def test_devices_lie_along_data_unless_a_mesh_is_named():
    slice_ = selection.absent_target(find_device("tpu-v5p:4x4x4"))
    assert selection.arrange(slice_, {}).mesh == {"data": 64}
    assert selection.arrange(slice_, {"data": 16, "fsdp": 4}).mesh == {"data": 16, "fsdp": 4}
    with pytest.raises(PegprofError, match="has 8 devices, and there are 64"):
        selection.arrange(slice_, {"data": 8})
    with pytest.raises(PegprofError, match="needs several devices"):
        selection.arrange(selection.cpu_target(), {"data": 8})
    assert not selection.arrange(selection.cpu_target(), {}).mesh


def test_a_batch_is_cut_along_data_and_fsdp():
    mesh = {"data": 4, "fsdp": 2, "model": 8}
    assert meshes.shares_of(mesh) == 8
    meshes.check_batch(mesh, 16)
    with pytest.raises(PegprofError, match="a batch of 12 cannot be cut into 8 parts") as caught:
        meshes.check_batch(mesh, 12)
    assert caught.value.hint == "choose a multiple of 8"


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((1024, 4096), (None, "model")),
        ((4096, 1024), ("model", None)),
        ((6, 4096), ("fsdp", "model")),
        ((7, 11), (None, None)),
        ((), ()),
    ],
)
def test_parameters_are_sharded_over_their_largest_axis_that_divides(shape, spec):
    mesh = shardings.abstract_mesh({"data": 2, "fsdp": 3, "model": 8})
    assert tuple(shardings.parameter_sharding(shape, mesh).spec) == spec
    assert shardings.batch_sharding(mesh).spec == jax.P(("data", "fsdp"))


def collective(**fields):
    usual = {"kind": "all-reduce", "count": 1, "bytes": 2**20, "trips": 1, "devices": 8, "loop": "", "source": "m.py:7"}
    return Collective(**{**usual, **fields})


def on_eight_devices():
    """The compiled rows of a slice, with what two methods send."""
    empty = dict.fromkeys(("time_s", "time_iqr_s", "time_ratio", "time_batch", "host_peak_bytes", "max_rel_error"))
    of_slice = {"target": "h100:8", "device": "8 × NVIDIA H100 80 GB", "mesh": "data=8", "devices": 8}
    rows = tuple(dataclasses.replace(row, **empty, **of_slice, status="ok", reason="") for row in RESULT.rows)
    in_loop = collective(kind="all-gather", trips=64, loop="optax.py:90")
    sent = {"grad": (collective(),), "microbatch": (in_loop,)}
    traffic = tuple(Traffic(batch=64, method=m, target="h100:8", collectives=found) for m, found in sent.items())
    return dataclasses.replace(RESULT, rows=rows, verdict=None, plans={}, traffic=traffic)


GOLDEN = """\
transformer-151m: 184.4 M parameters, seq_len 512, float32, batch 64, mean second_moment
h100:8: 8 × NVIDIA H100 80 GB, 20.0 GiB available each, mesh data=8; figures of one device
method      status  XLA peak  × grad   flops
────────────────────────────────────────────
grad        ok      85.0 GiB    1.00  41.3 T
vmap        ok      86.7 GiB    1.02  41.4 T
microbatch  ok             –       –       –
surgery     ok      13.0 GiB    0.15  41.5 T

method      collective  count  in a loop  bytes × trips  at least  most from
────────────────────────────────────────────────────────────────────────────
grad        all-reduce      1  no               1.0 MiB    4.1 µs  m.py:7
microbatch  all-gather      1  yes             64.0 MiB  130.5 µs  m.py:7
microbatch: all-gather inside a loop, 64 times (optax.py:90)
"""


def test_a_table_of_collectives_follows_that_of_the_methods():
    shown = render_terminal(on_eight_devices())
    assert shown.startswith(GOLDEN)


def test_a_result_of_a_mesh_is_read_back_whole():
    result = on_eight_devices()
    assert Result.from_json(result.to_json()) == result
