"""Which mesh: those that are tried, the front with a session that is made up, and the words that come of it."""

import dataclasses
import math

import pytest

from pegprof.errors import ExitCode, PegprofError
from pegprof.measure import fit as fitting
from pegprof.measure.front import Point, choose_meshes, common_batch, find_front, mark_front
from pegprof.measure.progress import Silence
from pegprof.measure.session import Session
from pegprof.report.front_text import render_front
from pegprof.result import events
from pegprof.result.findings import Compiled
from pegprof.result.settings import Settings
from pegprof.targets.devices import GIB, find_device
from pegprof.targets.hlo.collectives import Collective
from pegprof.targets.meshes import candidate_meshes, describe, shares_of
from pegprof.targets.selection import absent_target, cpu_target
from tests.result.results import make_facts, make_row

SLICE = absent_target(find_device("tpu-v5e:2x4"))
SETTINGS = Settings(model="made-up", time=False, methods=("grad", "microbatch"))


@pytest.mark.parametrize(("devices", "per_host"), [(2, 2), (4, 4), (6, 6), (8, 4), (8, 8), (16, 4), (32, 8), (256, 4)])
def test_the_meshes_of_a_slice_are_few_and_have_all_its_devices(devices, per_host):
    meshes = candidate_meshes(devices, per_host)
    assert 2 <= len(meshes) <= 8
    assert all(math.prod(mesh.values()) == devices for mesh in meshes)
    assert meshes[:2] == [{"data": devices}, {"fsdp": devices}]
    assert len({describe(mesh) for mesh in meshes}) == len(meshes)
    assert all(mesh.get("model", 1) <= per_host for mesh in meshes)
    sizes = [size for mesh in meshes[2:] for axis, size in mesh.items() if axis == "model" or "data" in mesh]
    assert devices == 6 or all(size & (size - 1) == 0 for size in sizes)


def test_a_node_of_eight_is_tried_in_these_meshes():
    assert [describe(mesh) for mesh in candidate_meshes(8, 8)] == [
        "data=8",
        "fsdp=8",
        "data=2,fsdp=4",
        "data=4,fsdp=2",
        "data=4,model=2",
        "data=2,model=4",
        "fsdp=2,model=4",
    ]


def test_one_device_has_no_meshes_and_a_batch_needs_one_that_divides_it():
    with pytest.raises(PegprofError, match="--mesh auto needs several devices, and cpu is one") as caught:
        choose_meshes(cpu_target(), batch=None)
    assert "--target tpu-v5p:4x4x4" in caught.value.hint
    with pytest.raises(PegprofError, match="a batch of 3 cannot be cut for any mesh of tpu-v5e:2x4") as caught:
        choose_meshes(SLICE, batch=3)
    assert caught.value.hint == "choose a multiple of 2"


def test_all_meshes_are_compared_at_a_batch_that_all_divide():
    targets = choose_meshes(SLICE, batch=None)
    assert common_batch(SETTINGS, targets) == 64
    assert common_batch(dataclasses.replace(SETTINGS, batches=(4,)), targets) == 8
    assert common_batch(dataclasses.replace(SETTINGS, microbatch_size=3), targets) == 48


def point(mesh, held, moved, status="ok"):
    row = make_row("grad", peak_bytes=held, collective_bytes=moved, status=status)
    return Point(mesh=mesh, method="grad", row=row, answer=None, most=None)


def test_the_front_is_what_no_other_mesh_is_better_than():
    points = [
        point("a", 5, 1),
        point("b", 1, 5),
        point("c", 5, 5),
        point("d", 3, 3),
        point("e", 3, 3),
        point("f", 3, 4),
    ]
    assert [each.mesh for each in mark_front(points) if each.is_on_front] == ["a", "b", "d", "e"]


def test_what_does_not_fit_is_not_on_the_front():
    points = [point("a", 1, 1, status="refused"), point("b", 9, 9), dataclasses.replace(point("c", 1, 1), row=None)]
    assert [each.mesh for each in mark_front(points) if each.is_on_front] == ["b"]


class MadeUp(Session):
    """Compiles nothing. A device holds its part of the batch and of the parameters; a mesh moves what it gathers."""

    def describe(self):
        (target,) = self.targets
        if target.mesh.get("model") == 4:
            raise PegprofError("the parameter w cannot be cut into 4 parts")
        self.log.add(events.Described(facts=make_facts(), capacity_bytes={target.name: target.device.memory_bytes}))

    def try_compile(self, batch, method, target, *, surgery_size=None, limit_s=None, count=""):
        mesh = target.mesh
        activations = 0.1 if method == "microbatch" else batch / shares_of(mesh) / mesh.get("model", 1)
        parameters = 8 / mesh.get("fsdp", 1) / mesh.get("model", 1)
        moved = Collective(
            kind="all-reduce", count=1, bytes=GIB * (1 + mesh_moves(mesh)), trips=1, devices=8, loop="", source=""
        )
        return Compiled(peak_bytes=int((activations + parameters) * GIB), collectives=(moved,))


def mesh_moves(mesh):
    return mesh.get("fsdp", 1) + 20 * mesh.get("model", 0)


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    monkeypatch.setattr(fitting, "Session", MadeUp)


def find(batch=None, saved=None, **changes):
    settings = dataclasses.replace(SETTINGS, **{"batches": (batch or 64,), **changes})
    save = (lambda result: None) if saved is None else saved.append
    return find_front(settings, SLICE, most=256, batch=batch, talk=Silence(), save=save)


GOLDEN = """\
transformer-151m: 184.4 M parameters, seq_len 512, float32, mean second_moment
tpu-v5e:2x4: 8 × TPU v5e, 15.8 GiB available each; figures of one device at batch 64
method      --mesh          largest batch             fits     needs     moves  front
─────────────────────────────────────────────────────────────────────────────────────
grad        data=8          56                        no    16.0 GiB   2.0 GiB
grad        fsdp=8          112                       yes    9.0 GiB   9.0 GiB  *
grad        data=2,fsdp=4   104                       yes   10.0 GiB   5.0 GiB  *
grad        data=4,fsdp=2   88                        yes   12.0 GiB   3.0 GiB  *
grad        data=4,model=2  92                        yes   12.0 GiB  42.0 GiB
microbatch  data=8          no limit found up to 256  yes    8.1 GiB   2.0 GiB  *
microbatch  fsdp=8          no limit found up to 256  yes    1.1 GiB   9.0 GiB  *
microbatch  data=2,fsdp=4   no limit found up to 256  yes    2.1 GiB   5.0 GiB  *
microbatch  data=4,fsdp=2   no limit found up to 256  yes    4.1 GiB   3.0 GiB  *
microbatch  data=4,model=2  no limit found up to 256  yes    4.1 GiB  42.0 GiB
* no other mesh needs less memory without moving more, or moves less without needing more
mesh data=2,model=4: the parameter w cannot be cut into 4 parts
mesh fsdp=2,model=4: the parameter w cannot be cut into 4 parts"""


def test_the_meshes_of_a_slice_read_so():
    found = find()
    assert render_front(found) == GOLDEN
    assert found.exit_code == ExitCode.OK


def test_every_compile_is_saved_with_its_mesh():
    saved = []
    found = find(saved=saved)
    meshes = [row.mesh for row in saved[-1].rows]
    assert set(meshes) == set(found.fits)
    assert len(saved[-1].rows) == len(found.result.rows) == sum(len(fit.result.rows) for fit in found.fits.values())
    assert {row.mesh for row in saved[0].rows} == {"data=8"}


def test_with_a_batch_nothing_else_is_compiled_and_meshes_that_do_not_divide_it_are_left_out_in_words():
    found = find(batch=4)
    assert {row.batch for row in found.result.rows} == {4}
    assert list(found.fits) == ["data=4,model=2"]
    shown = render_front(found)
    assert "largest batch" not in shown
    assert "mesh data=8: a batch of 4 cannot be cut into 8 parts" in shown
    assert found.exit_code == ExitCode.OK


def test_a_batch_that_fits_on_no_mesh_is_a_no():
    assert find(batch=1024, methods=("grad",)).exit_code == ExitCode.NO
    assert find(batch=64, methods=("grad",)).exit_code == ExitCode.OK


class Broken(MadeUp):
    def try_compile(self, batch, method, target, **fields):
        found = super().try_compile(batch, method, target, **fields)
        return Compiled(failure="it broke") if "fsdp" in target.mesh else found


def test_a_compile_that_fails_is_no_answer_and_is_said_of_its_mesh(monkeypatch):
    monkeypatch.setattr(fitting, "Session", Broken)
    found = find()
    assert found.exit_code == ExitCode.UNMEASURED
    assert "grad, mesh fsdp=8: batch 64: it broke" in render_front(found)


def test_the_time_limit_is_for_all_meshes_and_what_it_came_before_is_named(monkeypatch):
    now_s = [0.0]

    class Slow(MadeUp):
        def try_compile(self, *arguments, **fields):
            now_s[0] += 30.0
            return super().try_compile(*arguments, **fields)

    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    monkeypatch.setattr(fitting, "Session", Slow)
    found = find(batch=64, methods=("grad",), time_limit_s=50.0)
    assert list(found.fits) == ["data=8", "fsdp=8"]
    assert found.untried
    assert "\nthe time limit came before these meshes: data=2,fsdp=4 data=4,fsdp=2" in render_front(found)
    assert find(batch=1024, methods=("grad",), time_limit_s=50.0).exit_code == ExitCode.TIME_LIMIT
    with pytest.raises(PegprofError, match="the time limit came before anything was compiled") as caught:
        find(time_limit_s=0.0)
    assert caught.value.exit_code == ExitCode.TIME_LIMIT
