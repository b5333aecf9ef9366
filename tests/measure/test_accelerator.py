"""``pegprof run`` and ``fit`` where the device that is here is an accelerator: a fake one, in real processes."""

import csv
import fcntl
import io
import json
import os

import pytest

from pegprof.errors import ExitCode
from tests.cli.commands import ENVIRONMENT, Pegprof, commit_file
from tests.fake_device import FakeDevice
from tests.waiting import finish

pytestmark = pytest.mark.slow

BATCH = 64
MODEL = ("mlp", "--set", "width=128")
RUN = ("run", *MODEL, "--batch", BATCH, "--runs", 2, "--no-csv", "--export-json", "-")
BETWEEN_BYTES = 16 * 2**20
"""Less than the gradients of all examples take, and more than anything that ``grad`` takes."""


class Done:
    """What came of a command on a device."""

    def __init__(self, device, *arguments):
        pegprof, self.device = Pegprof(device.folder), device
        with pegprof.start(*arguments, **device.environment(ENVIRONMENT["PYTHONPATH"])) as process:
            self.pid = process.pid
            self.stdout, self.stderr = finish(process)
        self.exit_code = process.returncode

    @property
    def rows(self):
        return {row["method"]: row for row in json.loads(self.stdout)["rows"]}


@pytest.fixture(scope="module")
def h100_done(tmp_path_factory):
    device = FakeDevice(folder=tmp_path_factory.mktemp("h100"))
    return Done(device, *RUN, "--methods", "grad,vmap")


def test_every_row_is_measured_on_the_device_by_its_name(h100_done):
    assert h100_done.exit_code == ExitCode.OK, h100_done.stderr
    assert list(h100_done.rows) == ["grad", "vmap"]
    for row in h100_done.rows.values():
        assert (row["evidence"], row["status"]) == ("measured", "ok")
        assert (row["target"], row["device"]) == ("h100", h100_done.device.kind)
        assert row["capacity_bytes"] == h100_done.device.memory_bytes
        assert row["time_s"] > 0
        assert (row["time_batch"], row["runs"]) == (BATCH, 2)


def test_a_peak_is_the_devices_own_of_that_method_alone(h100_done):
    grad, vmap = h100_done.rows["grad"], h100_done.rows["vmap"]
    for row in (grad, vmap):
        assert row["device_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.01)
        assert row["host_peak_bytes"] is None
    assert vmap["device_peak_bytes"] > grad["device_peak_bytes"] + BETWEEN_BYTES


def test_one_process_at_a_time_has_the_device_and_never_the_parent(h100_done):
    owners = [event["pid"] for event in h100_done.device.events("started")]
    assert len(owners) == len(set(owners)) >= 4  # whoever asks, the workers, a fresh process for each peak
    assert h100_done.pid not in owners
    assert h100_done.device.events("turned away") == []


def test_no_process_takes_more_of_the_device_than_it_needs(h100_done):
    assert {event["preallocated_bytes"] for event in h100_done.device.events("started")} == {0}


def test_what_does_not_fit_is_refused_in_words_and_the_rest_is_measured(tmp_path):
    device = FakeDevice(folder=tmp_path, platform="tpu", kind="TPU v5", memory_bytes=BETWEEN_BYTES)
    done = Done(device, *RUN, "--methods", "grad,vmap", "--no-check")
    assert done.exit_code == ExitCode.OK, done.stderr
    grad, vmap = done.rows["grad"], done.rows["vmap"]
    assert (vmap["target"], vmap["status"]) == ("tpu-v5p", "refused")
    assert "MiB, 16.0 MiB available" in vmap["reason"]
    assert (grad["status"], grad["evidence"]) == ("ok", "measured")
    assert grad["device_peak_bytes"] <= BETWEEN_BYTES


def test_memory_that_somebody_else_has_taken_makes_a_run_refused_not_failed(tmp_path):
    device = FakeDevice(folder=tmp_path, others_bytes=FakeDevice.memory_bytes - BETWEEN_BYTES)
    done = Done(device, *RUN, "--methods", "grad,vmap", "--no-check")
    assert done.exit_code == ExitCode.OK, done.stderr
    assert (done.rows["vmap"]["status"], done.rows["grad"]["status"]) == ("refused", "ok")
    assert "RESOURCE_EXHAUSTED: Out of memory" in done.rows["vmap"]["reason"]
    assert done.rows["grad"]["device_peak_bytes"]


def test_a_worker_that_is_killed_costs_its_own_row_and_leaves_the_device_to_the_next(tmp_path):
    device = FakeDevice(folder=tmp_path, deadly_bytes=BETWEEN_BYTES)
    done = Done(device, *RUN, "--methods", "grad,vmap", "--no-check")
    assert done.exit_code == ExitCode.UNMEASURED
    grad, vmap = done.rows["grad"], done.rows["vmap"]
    assert vmap["status"] == "failed"
    assert vmap["reason"].startswith("killed by SIGKILL")
    assert (grad["status"], grad["evidence"]) == ("ok", "measured")
    assert grad["device_peak_bytes"]
    assert len(device.events("died")) == 1
    assert device.events("turned away") == []


def test_a_device_without_accounts_is_measured_without_a_peak(tmp_path):
    done = Done(FakeDevice(folder=tmp_path, memory_stats="raises"), *RUN, "--methods", "grad", "--no-check")
    assert done.exit_code == ExitCode.OK, done.stderr
    grad = done.rows["grad"]
    assert (grad["status"], grad["evidence"]) == ("ok", "measured")
    assert grad["time_s"] > 0
    assert (grad["device_peak_bytes"], grad["host_peak_bytes"], grad["capacity_bytes"]) == (None, None, None)


def test_the_largest_batch_is_found_though_all_searches_share_a_process(tmp_path):
    device = FakeDevice(folder=tmp_path, memory_bytes=BETWEEN_BYTES)
    done = Done(device, "fit", *MODEL, "--methods", "grad,vmap", "--up-to", BATCH, "--export-csv", "-")
    assert done.exit_code == ExitCode.OK, done.stderr
    rows = [row for row in csv.DictReader(io.StringIO(done.stdout)) if row["status"] == "ok"]
    largest = {row["method"]: int(row["batch"]) for row in sorted(rows, key=lambda row: int(row["batch"]))}
    assert largest["grad"] == BATCH
    assert BATCH // 4 < largest["vmap"] < BATCH
    assert len(device.events("started")) == 2  # whoever asks, and the worker


def test_a_device_that_somebody_else_has_is_said_with_its_owner(tmp_path):
    device = FakeDevice(folder=tmp_path)
    with (tmp_path / "owner").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        owner.write(str(os.getpid()))
        owner.flush()
        done = Done(device, *RUN, "--methods", "grad")
    assert done.exit_code == ExitCode.UNMEASURED
    assert "error: the device could not be used: " in done.stderr
    assert f"already in use by process with pid {os.getpid()}" in done.stderr
    assert device.events("started") == []


NET = """
from pegprof.models.problem import load_problem
net = load_problem("mlp", {"width": 128})
"""


def test_two_revisions_take_turns_on_a_device_that_one_process_can_have(tmp_path):
    commit_file(tmp_path / "net.py", NET)
    device = FakeDevice(folder=tmp_path)
    model = ("net.py:net", "--batch", BATCH, "--methods", "grad,surgery")
    done = Done(device, "gate", *model, "--against", "HEAD", "--processes", 2, "--runs", 2, "--export-json", "-")
    assert device.events("turned away") == []
    assert done.exit_code == ExitCode.OK, done.stderr
    (found,) = json.loads(done.stdout)["gates"]
    (change,) = [change for change in found["changes"] if change["metric"] == "time_ratio"]
    assert "2 processes × 2 rounds" in change["words"]
