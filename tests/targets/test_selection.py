"""What the machine and its container leave, from made-up trees of /proc and /sys."""

from types import SimpleNamespace

import pytest

from pegprof.errors import PegprofError
from pegprof.targets import selection

GIB = 2**30


def _write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")


def test_a_version_2_container_counts_its_cache_as_free(tmp_path):
    group = "sys/fs/cgroup/work"
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/work/inner",
            f"{group}/memory.max": 8 * GIB,
            f"{group}/memory.current": 5 * GIB,
            f"{group}/memory.stat": f"anon {3 * GIB}\ninactive_file {2 * GIB}",
            f"{group}/inner/memory.max": "max",
            f"{group}/inner/memory.current": GIB,
            f"{group}/inner/memory.stat": "anon 1",
        },
    )
    assert selection.free_container_bytes(tmp_path) == [5 * GIB]


def test_a_version_1_container_is_read_too(tmp_path):
    group = "sys/fs/cgroup/memory/docker"
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/docker\n5:memory:/docker",
            f"{group}/memory.limit_in_bytes": 4 * GIB,
            f"{group}/memory.usage_in_bytes": 2 * GIB,
            f"{group}/memory.stat": f"total_inactive_file {GIB}",
        },
    )
    assert selection.free_container_bytes(tmp_path) == [3 * GIB]


def test_a_container_that_sees_its_group_at_the_root_is_read_there(tmp_path):
    files = {"memory.max": 4 * GIB, "memory.current": GIB, "memory.stat": "anon 1"}
    _write(tmp_path, {"proc/self/cgroup": "0::/", **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}})
    assert selection.free_container_bytes(tmp_path) == [3 * GIB]


def test_a_container_that_is_held_up_before_it_is_full_is_full_there(tmp_path):
    files = {"memory.max": 8 * GIB, "memory.high": 4 * GIB, "memory.current": GIB, "memory.stat": "anon 1"}
    _write(tmp_path, {"proc/self/cgroup": "0::/", **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}})
    assert selection.free_container_bytes(tmp_path) == [3 * GIB]


@pytest.mark.parametrize(("containers", "expected"), [([], 10 * GIB), ([4 * GIB, 12 * GIB], 4 * GIB), ([-1], 0)])
def test_available_is_what_the_machine_and_its_containers_leave(monkeypatch, containers, expected):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10 * GIB, total=20 * GIB))
    monkeypatch.setattr(selection, "free_container_bytes", lambda: containers)
    assert selection.available_host_bytes() == expected
    assert selection.free_host_bytes() == max(0, int(expected * 0.95) - selection.PROCESS_BYTES)


@pytest.mark.parametrize(("left", "short"), [(GIB, False), (GIB // 4, True)])
def test_a_machine_is_short_of_memory_before_it_has_none(monkeypatch, left, short):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=left, total=20 * GIB))
    assert (selection.short_of_memory() is not None) == short


def test_no_container_sets_no_limit(tmp_path):
    assert selection.free_container_bytes(tmp_path) == []


def test_this_machine_has_some_memory_and_a_name():
    assert 0 < selection.free_host_bytes() < 2**50
    assert selection.cpu_name()


@pytest.mark.parametrize(("cores", "words"), [({0}, ", 1 core"), ({0, 3}, ", 2 cores")])
def test_the_cores_are_those_that_this_process_may_use(monkeypatch, cores, words):
    monkeypatch.setattr(selection.os, "sched_getaffinity", lambda pid: cores, raising=False)
    assert selection.cpu_name().endswith(words)


def test_jax_platforms_chooses_the_target(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert selection.host_target().name == "gpu"
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    with pytest.raises(PegprofError, match="abacus"):
        selection.host_target()


def test_without_jax_platforms_a_machine_without_devices_is_a_cpu(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(selection, "ACCELERATORS", ())
    assert selection.host_target().environment["JAX_PLATFORMS"] == "cpu"
