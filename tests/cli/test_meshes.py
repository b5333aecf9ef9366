"""Slices of devices, and meshes."""

import pytest

from pegprof.errors import ExitCode
from tests.cli.commands import rows_of
from tests.compilers import needs_compilers

SMALL = ["--set", "layers=1", "--seq-len", "32", "--batch", "16", "--no-csv"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "cpu:8", "--mesh", "data=4"], "the mesh data=4 has 4 devices, and there are 8"),
        (["--target", "cpu:8", "--mesh", "dat=8"], "unknown mesh axis 'dat'"),
        (["--target", "cpu:8", "--batch", "12"], "a batch of 12 cannot be cut into 8 parts"),
        (["--target", "tpu-v5p:4x4"], "tpu-v5p:4x4 is no slice"),
        (["--target", "tpu-v5p:3x5x7"], "no whole number of hosts"),
        (["--mesh", "data=8"], "needs several devices, and cpu is one"),
    ],
)
def test_what_is_no_mesh_is_told_at_once_with_a_hint(pegprof_in, arguments, words):
    done = pegprof_in("run", "transformer-tiny", *SMALL, *arguments)
    assert done.returncode == ExitCode.USAGE
    assert words in done.stderr
    assert "\nhint: " in done.stderr


def test_an_inspection_is_of_one_device(pegprof_in):
    done = pegprof_in("inspect", "transformer-tiny", *SMALL[:-1], "--target", "tpu-v5p:2x2x1")
    assert done.returncode == 0, done.stderr
    assert "of 4 examples on each of 4 devices (tpu-v5p), all at once" in done.stdout


@pytest.mark.slow
def test_virtual_devices_are_measured(pegprof_in):
    options = ["--target", "cpu:8", "--methods", "grad,vmap,surgery", "--runs", "3"]
    done = pegprof_in("run", "transformer-tiny", *SMALL[:-1], *options, "--export-csv", "-")
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {(row["mesh"], row["devices"], row["evidence"]) for row in rows.values()} == {("data=8", "8", "measured")}
    sent = {method: int(row["collective_bytes"]) for method, row in rows.items()}
    assert 0 < sent["grad"] < sent["vmap"]
    assert sent["surgery"] <= 1.1 * sent["vmap"]
    assert {row["loop_collective_bytes"] for row in rows.values()} == {"0"}
    assert int(rows["surgery"]["flops"]) <= 1.05 * int(rows["vmap"]["flops"])
    assert "surgery  all-reduce" in done.stderr


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "mesh"), [("tpu-v5p:2x2x2", "data=4,fsdp=2"), ("tpu-v5e:4x4", "data=16"), ("h100:8", "data=4,model=2")]
)
def test_a_slice_that_is_not_here_is_compiled_for(pegprof_in, target, mesh):
    options = ["--target", target, "--mesh", mesh, "--methods", "grad,vmap,surgery"]
    done = pegprof_in("run", "transformer-tiny", *SMALL[:-1], *options, "--export-csv", "-")
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert {(row["status"], row["mesh"], row["evidence"]) for row in rows.values()} == {("ok", mesh, "compiled")}
    assert all(float(row["collective_floor_s"]) > 0 for row in rows.values())
    assert int(rows["surgery"]["loop_collective_bytes"]) == 0
