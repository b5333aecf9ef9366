"""Slices of devices, and meshes."""

import csv

import pytest

from pegprof.errors import ExitCode
from pegprof.result.result import Result
from tests.cli.commands import MODELS, rows_of
from tests.compilers import needs_compilers

SMALL = ["--set", "layers=1", "--seq-len", "32", "--batch", "16", "--no-csv"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "cpu:8", "--mesh", "data=4"], "the mesh data=4 has 4 devices, and there are 8"),
        (["--target", "cpu:8", "--mesh", "dat=8"], "unknown mesh axis 'dat'"),
        (["--target", "cpu:8", "--batch", "12"], "a batch of 12 cannot be cut into 8 parts"),
        (["--target", "tpu-v5p:4x4"], "tpu-v5p:4x4 is not a slice"),
        (["--target", "tpu-v5p:3x5x7"], "not a whole number of hosts"),
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--target", "cpu:8"], "--mesh auto tries several meshes, and only pegprof fit does that"),
        (["inspect", "--target", "cpu:8"], "--mesh auto tries several meshes, and only pegprof fit does that"),
        (["fit"], "--mesh auto needs several devices, and cpu is one"),
        (["fit", "--target", "cpu:8", "--batch", "3"], "a batch of 3 cannot be cut for any mesh of cpu:8"),
    ],
)
def test_meshes_are_tried_by_fit_alone_and_on_several_devices(pegprof_in, arguments, words):
    command, *others = arguments
    done = pegprof_in(command, "transformer-tiny", *others, "--mesh", "auto")
    assert done.returncode == ExitCode.USAGE
    assert words in done.stderr
    assert "\nhint: " in done.stderr


@pytest.mark.slow
def test_the_meshes_of_a_slice_are_tried(pegprof_in):
    options = ["--target", "cpu:2", "--mesh", "auto", "--methods", "grad,surgery", "--up-to", "128"]
    done = pegprof_in("fit", f"{MODELS}:twins", *options, "--export-csv", "all.csv")
    assert done.returncode == 0, done.stderr
    assert "figures of one device at batch 64" in " ".join(done.stdout.split())
    cells = [line.split() for line in done.stdout.splitlines() if line.startswith(("grad", "surgery"))]
    assert [row[:2] for row in cells] == [[m, mesh] for m in ("grad", "surgery") for mesh in ("data=2", "fsdp=2")]
    assert all("no limit found up to 128" in line for line in done.stdout.splitlines() if line.startswith("grad"))
    rows = list(csv.DictReader((pegprof_in.folder / "all.csv").read_text().splitlines()))
    assert {(row["mesh"], row["batch"]) for row in rows} == {
        (m, b) for m in ("data=2", "fsdp=2") for b in ("64", "128")
    }


TWINS = [f"{MODELS}:twins", "--target", "cpu:8", "--mesh", "data=2,fsdp=4", "--batch", "16"]


@pytest.mark.slow
def test_parameters_lie_as_the_model_says(pegprof_in):
    done = pegprof_in("run", *TWINS, "--methods", "grad,surgery", "--no-time", "--export-csv", "-")
    assert done.returncode == 0, done.stderr
    batch_bytes, matrix_bytes = 16 // 8 * 64 * 4, 64 * 64 * 4
    for row in rows_of(done.stdout).values():
        assert int(row["argument_bytes"]) == matrix_bytes + matrix_bytes // 4 + batch_bytes


NO_AXIS = "the parameter down of shape (64, 64) cannot be sharded over 'tensor': the mesh has data, fsdp, model"


@pytest.mark.parametrize(
    ("command", "spec", "words"),
    [
        ("run", "tensor", NO_AXIS),
        ("fit", "tensor", NO_AXIS),
        ("inspect", "tensor", NO_AXIS),
        ("run", "", "sharding raised KeyError: 'tensor'"),
    ],
)
def test_a_sharding_that_cannot_be_is_told_at_once_at_the_users_line(pegprof_in, command, spec, words):
    done = pegprof_in(command, *TWINS, "--set", f"spec={spec}")
    assert done.returncode == ExitCode.USAGE
    assert words in done.stderr
    assert f"{MODELS}:" in done.stderr


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


def assert_origins_are_known(file):
    """Everything that is sent is of a line or a parameter; surgery's largest reduction is of a matrix."""
    for traffic in Result.from_json(file.read_text()).traffic:
        assert all(each.source or each.parameter for each in traffic.collectives)
        if traffic.method == "surgery":
            reductions = [each for each in traffic.collectives if "reduce" in each.kind]
            assert max(reductions, key=lambda each: each.bytes).parameter in MATRICES


MATRICES = {"embed/embedding", "block_0/up/kernel", "block_0/down/kernel"} | {
    f"block_0/attention/{name}/kernel" for name in ("key", "query", "value", "out")
}


@pytest.mark.slow
def test_the_parameter_that_most_bytes_are_of_is_named(pegprof_in):
    options = ["--target", "cpu:8", "--mesh", "data=2,fsdp=4", "--methods", "grad,surgery", "--no-time"]
    done = pegprof_in("run", "transformer-tiny", *SMALL, *options, "--export-json", "result.json")
    assert done.returncode == 0, done.stderr
    assert_origins_are_known(pegprof_in.folder / "result.json")
    for traffic in Result.from_json((pegprof_in.folder / "result.json").read_text()).traffic:
        gathered = {each.parameter for each in traffic.collectives if each.kind == "all-gather"}
        assert gathered >= MATRICES
    table = done.stdout.partition("most from")[2]
    assert "grad     all-gather" in table
    assert "embed/embedding" in table


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "mesh"), [("tpu-v5p:2x2x2", "data=4,fsdp=2"), ("tpu-v5e:4x4", "data=16"), ("h100:8", "data=4,model=2")]
)
def test_a_slice_that_is_not_here_is_compiled_for(pegprof_in, target, mesh):
    options = ["--target", target, "--mesh", mesh, "--methods", "grad,vmap,surgery", "--export-json", "result.json"]
    done = pegprof_in("run", "transformer-tiny", *SMALL[:-1], *options, "--export-csv", "-")
    assert done.returncode == 0, done.stderr
    assert_origins_are_known(pegprof_in.folder / "result.json")
    rows = rows_of(done.stdout)
    assert {(row["status"], row["mesh"], row["evidence"]) for row in rows.values()} == {("ok", mesh, "compiled")}
    assert all(float(row["collective_floor_s"]) > 0 for row in rows.values())
    assert int(rows["surgery"]["loop_collective_bytes"]) == 0


@pytest.mark.slow
def test_a_step_keeps_the_shardings_of_parameters_of_one_shape_that_lie_in_two_ways(pegprof_in):
    model = f"{MODELS}:twins"
    options = ["--target", "cpu:8", "--mesh", "data=2,fsdp=4", "--step", "micro_adam", "--methods", "grad,surgery"]
    done = pegprof_in("run", model, "--batch", "16", "--runs", "1", *options, "--export-csv", "-")
    assert done.returncode == 0, done.stderr
    assert {row["status"] for row in rows_of(done.stdout).values()} == {"ok"}
