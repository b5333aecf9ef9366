"""The table of devices, what is missing to compile for them, and how targets are chosen. Nothing is compiled."""

import dataclasses
import importlib
import sys
import tomllib
from pathlib import Path

import pytest

from pegprof.errors import ExitCode, PegprofError
from pegprof.report import target_list
from pegprof.report.target_list import list_targets, render
from pegprof.targets import compilers, selection
from pegprof.targets.chips import CHIPS
from pegprof.targets.compilers import CUDA, TPU, Wheels
from pegprof.targets.devices import DEVICES, GIB, require_compiler

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_INSTALLED = dataclasses.replace(TPU, wheels=(Wheels(modules=("no_such_package.no_module",), packages=()),))
INSTALLED = dataclasses.replace(CUDA, wheels=(Wheels(modules=("json",), packages=("jax",)),))


def host(name="cpu", backend="cpu"):
    return selection.Target(name=name, backend=backend, environment={}, runs=True)


def test_names_and_kinds_are_of_one_device_each():
    kinds = [kind for chip in CHIPS.values() for kind in chip.kinds]
    assert CHIPS.keys() == DEVICES.keys()
    assert len(set(kinds)) == len(kinds)
    assert not {"cpu", "tpu", "gpu"} & set(DEVICES)


PUBLISHED_GB = {"tpu-v4": 32, "tpu-v5e": 16, "tpu-v5p": 95, "tpu-v6e": 32, "tpu-7x": 192 / 2} | {
    **dict(t4=16, l4=24, a100=40, h100=80, h200=141, b200=192),
    "a100-80": 80,
}


@pytest.mark.parametrize("name", DEVICES)
def test_programs_can_have_about_the_memory_that_is_published(name):
    assert DEVICES[name].memory_bytes / 1e9 == pytest.approx(PUBLISHED_GB[name], rel=0.1)


def test_the_extras_install_what_the_compilers_need():
    extras = PROJECT["optional-dependencies"]
    assert any(requirement.startswith("jax[tpu]") for requirement in extras[TPU.extra])
    assert [requirement.partition(">=")[0] for requirement in extras[CUDA.extra]] == list(CUDA.packages)
    assert "pegprof[tpu,gpu]" in extras["test"]


def test_a_compiler_that_is_missing_is_told_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(compilers, "has_wheels", lambda: True)
    monkeypatch.setattr(compilers, "_origin", dict)
    with pytest.raises(PegprofError, match=r"tpu-v5e is not installed\nhint: pip install 'pegprof\[tpu\]'") as caught:
        require_compiler(dataclasses.replace(DEVICES["tpu-v5e"], compiler=NOT_INSTALLED))
    assert caught.value.exit_code == ExitCode.UNMEASURED


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        ({}, "pip install 'pegprof[gpu]'"),
        ({"url": "file:///my%20clone", "dir_info": {"editable": True}}, "pip install -e '/my clone[gpu]'"),
        ({"url": Path.cwd().as_uri(), "dir_info": {"editable": True}}, "pip install -e '.[gpu]'"),
        ({"url": "file:///clone", "dir_info": {}}, "pip install 'pegprof[gpu]'"),
        (
            {"url": "https://git.example/pegprof.git", "vcs_info": {"vcs": "git"}},
            "pip install 'pegprof[gpu] @ git+https://git.example/pegprof.git'",
        ),
    ],
    ids=["from an index", "from a clone", "in the clone", "from a folder", "from git"],
)
def test_the_line_that_installs_an_extra_is_that_of_how_pegprof_was_installed(monkeypatch, origin, line):
    monkeypatch.setattr(compilers, "_origin", lambda: origin)
    assert compilers.install_line("gpu") == line


@pytest.fixture
def fake_wheels(tmp_path, monkeypatch):
    """Installs packages that hold nothing, each with its version and its modules."""

    def install(package, *modules):
        for module in modules:
            folder = tmp_path / "site" / module.replace(".", "/")
            folder.mkdir(parents=True)
            (folder / "__init__.py").touch()
        metadata = tmp_path / "site" / f"{package.replace('-', '_')}-13.1.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 13.1\n")
        importlib.invalidate_caches()

    def imported():
        return [name for name in sys.modules if name.partition(".")[0] in ("jax_plugins", "nvidia")]

    really_installed = [path for path in sys.path if "site-packages" in path]  # which shall not count
    others = [path for path in sys.path if path not in really_installed]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *others])
    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    yield install
    for name in imported():
        del sys.modules[name]


def test_the_wheels_of_cuda_13_are_a_compiler_for_gpus_too(fake_wheels):
    assert not CUDA.is_installed
    fake_wheels("jax-cuda13-plugin", "jax_cuda13_plugin")
    fake_wheels("jax-cuda13-pjrt", "jax_plugins.xla_cuda13")
    fake_wheels("nvidia-cublas", "nvidia.cu13")  # any of NVIDIA's wheels makes that folder: it is not yet nvcc
    assert not CUDA.is_installed
    fake_wheels("nvidia-cuda-nvcc")
    assert CUDA.is_installed
    assert compilers.why_not(CUDA) is None
    assert CUDA.description == "jax-cuda13-plugin 13.1, jax-cuda13-pjrt 13.1, nvidia-cuda-nvcc 13.1"


def test_where_there_are_no_wheels_no_line_is_given_that_would_fail(monkeypatch):
    monkeypatch.setattr(compilers.sys, "platform", "darwin")
    remedy = compilers.why_not(NOT_INSTALLED)
    assert "its wheels are for Linux on x86-64 only" in remedy
    assert "pip" not in remedy


def test_the_host_is_chosen_where_nothing_is_named():
    assert selection.choose_targets((), host()) == (host(),)


def test_targets_come_in_the_order_of_their_names_and_only_the_host_runs(monkeypatch):
    monkeypatch.setattr(selection, "require_compiler", lambda device: None)
    chosen = selection.choose_targets(("h100", "cpu", "tpu-v5e"), host())
    assert [(each.name, each.backend, each.runs) for each in chosen] == [
        ("h100", "h100", False),
        ("cpu", "cpu", True),
        ("tpu-v5e", "tpu-v5e", False),
    ]
    assert {each.environment.get("JAX_PLATFORMS", "cpu") for each in chosen} == {"cpu"}


def test_a_name_that_is_not_known_is_told_with_the_nearest():
    with pytest.raises(PegprofError, match=r"unknown target 'tpu-v5'\nhint: did you mean 'tpu-v5."):
        selection.choose_targets(("tpu-v5",), host())


def test_an_accelerator_that_is_here_goes_by_its_name_in_the_table_and_runs(monkeypatch):
    monkeypatch.setattr(selection, "host_target", lambda: host("gpu", "gpu"))
    found = selection.find_host(lambda target: "NVIDIA H100 80GB HBM3")
    assert (found.name, found.backend, found.runs, found.device) == ("h100", "gpu", True, None)
    for name in ("h100", "gpu"):
        assert selection.choose_targets((name,), found) == (found,)
    (cpu,) = selection.choose_targets(("cpu",), found)
    assert not cpu.runs


@pytest.mark.parametrize("kind", ["Some Other GPU", None])
def test_an_accelerator_that_the_table_does_not_have_keeps_the_name_of_its_kind(monkeypatch, kind):
    monkeypatch.setattr(selection, "host_target", lambda: host("gpu", "gpu"))
    assert selection.find_host(lambda target: kind).name == "gpu"


def test_where_jax_passes_over_an_accelerator_the_processor_is_not_called_one(monkeypatch):
    monkeypatch.setattr(selection, "host_target", lambda: host("gpu", "gpu"))
    found = selection.find_host(lambda target: "cpu")
    assert (found.name, found.backend, found.is_host, found.runs) == ("cpu", "cpu", True, True)


def test_nobody_is_asked_what_kind_a_processor_is():
    assert selection.find_host(pytest.fail).name == "cpu"


GOLDEN = """\
target   device                     memory  status
───────────────────────────────────────────────────────────────
cpu      Some Processor, 2 cores  20.0 GiB  here: measured
tpu-v5e  TPU v5e                  15.8 GiB  compiler missing
h100     NVIDIA H100 80 GB        79.1 GiB  can be compiled for
for tpu-v5e: pip install 'pegprof[tpu]'"""


def test_the_list_says_what_is_here_what_can_be_compiled_for_and_how_to_get_the_rest(monkeypatch):
    compiler_of = {"tpu-v5e": NOT_INSTALLED, "h100": INSTALLED}
    devices = {name: dataclasses.replace(DEVICES[name], compiler=compiler) for name, compiler in compiler_of.items()}
    monkeypatch.setattr(target_list, "DEVICES", devices)
    monkeypatch.setattr(compilers, "has_wheels", lambda: True)
    monkeypatch.setattr(compilers, "_origin", dict)
    monkeypatch.setattr(target_list, "cpu_name", lambda: "Some Processor, 2 cores")
    monkeypatch.setattr(target_list, "free_host_bytes", lambda: 20 * GIB)
    assert render(list_targets(host())) == GOLDEN
