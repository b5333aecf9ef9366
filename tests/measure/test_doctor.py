"""The doctor, on machines that are made up."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

from pegprof.errors import ExitCode
from pegprof.measure import doctor
from pegprof.measure.doctor import EXTRAS, PACKAGES, Memory, Symptoms, diagnose, exit_code
from pegprof.report.doctor_text import render
from pegprof.targets import compilers

GIB = 2**30
PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

HEALTHY = Symptoms(
    python="3.11.7",
    versions={
        **dict.fromkeys((p for extra in EXTRAS.values() for p in extra.packages), None),
        **dict(jax="0.10.2", jaxlib="0.10.2", flax="0.12.8", optax="0.2.8"),
        **dict(typer="0.29.0", rich="14.0.0", psutil="7.0.0", pandas="2.2.3", scipy="1.15.0"),
        "platformdirs": "4.14.0",
        "matplotlib": "3.10",
    },
    required={"jax": "0.10", "flax": "0.12.8", "optax": "0.2.8"},
    devices=("cpu: Some Processor, 2 cores",),
    device_failure=None,
    idle_accelerators=(),
    memory=Memory(total=24 * GIB, available=20 * GIB, container=None, for_a_run=18 * GIB),
)

GOLDEN = """\
pegprof 0.1.0
ok    python             3.11.7
ok    jax                0.10.2
ok    jaxlib             0.10.2
ok    flax               0.12.8
ok    optax              0.2.8
ok    typer              0.29.0
ok    rich               14.0.0
ok    psutil             7.0.0
ok    pandas             2.2.3
ok    scipy              1.15.0
ok    platformdirs       4.14.0
ok    device             cpu: Some Processor, 2 cores
ok    memory             20.0 GiB of 24.0 GiB available; a run may take 18.0 GiB
note  targets            no compiler for a device that is not here
note  extra tpu          not installed, for a TPU, here or only compiled for; pip install
                         'pegprof[tpu]'
note  extra gpu          not installed, for an NVIDIA GPU that is only compiled for; pip install
                         'pegprof[gpu]'
note  extra cuda12       not installed, for an NVIDIA GPU here, CUDA 12; pip install
                         'pegprof[cuda12]'
note  extra cuda13       not installed, for an NVIDIA GPU here, CUDA 13; pip install
                         'pegprof[cuda13]'
ok    extra bench        installed, for the figures of benchmarks/
note  extra experiments  not installed, for pegprof experiment; pip install 'pegprof[experiments]'
note  extra test         not installed, for the tests; pip install 'pegprof[test]'
note  extra dev          not installed, for development; pip install 'pegprof[dev]'
Ready to measure."""


@pytest.fixture(autouse=True)
def installed_from_an_index(monkeypatch):
    monkeypatch.setattr(compilers, "_origin", dict)


def test_a_healthy_machine_reads_so():
    findings = diagnose(HEALTHY)
    assert render(findings) == GOLDEN
    assert exit_code(findings) == ExitCode.OK


def with_version(package, version):
    return dataclasses.replace(HEALTHY, versions={**HEALTHY.versions, package: version})


@pytest.mark.parametrize(
    ("symptoms", "line"),
    [
        (with_version("optax", None), "problem  optax              is not installed; pip install -U 'optax>=0.2.8'"),
        (
            with_version("jax", "0.9.2"),
            "problem  jax                0.9.2 is older than 0.10; pip install -U 'jax>=0.10'",
        ),
        (
            dataclasses.replace(HEALTHY, devices=(), device_failure="RuntimeError: no TPU"),
            "problem  device             RuntimeError: no TPU; JAX_PLATFORMS=cpu pegprof run ... measures on the CPU",
        ),
    ],
)
def test_what_stands_in_the_way_is_a_problem_with_its_remedy(symptoms, line):
    findings = diagnose(symptoms)
    text = render(findings, width=120)
    assert line in text
    assert text.endswith("Not ready to measure: 1 problem above.")
    assert exit_code(findings) == ExitCode.UNMEASURED


@pytest.mark.parametrize(
    ("symptoms", "line"),
    [
        (
            dataclasses.replace(HEALTHY, idle_accelerators=("gpu",)),
            "  there is a GPU here, but JAX has no plug-in for it; pip install 'pegprof[cuda12]'",
        ),
        (dataclasses.replace(HEALTHY, memory=None), "note  memory             unknown without psutil"),
        (
            dataclasses.replace(HEALTHY, targets=("tpu-v5e", "h100")),
            "ok    targets            compilers for tpu-v5e, h100",
        ),
        (
            dataclasses.replace(HEALTHY, has_wheels=False),
            "note  extra tpu          no wheels for this system, for a TPU, here or only compiled for",
        ),
        (
            dataclasses.replace(HEALTHY, memory=dataclasses.replace(HEALTHY.memory, container=GIB)),
            "20.0 GiB of 24.0 GiB available, the container leaves 1.0 GiB; a run",
        ),
    ],
)
def test_what_only_could_be_better_is_a_note(symptoms, line):
    findings = diagnose(symptoms)
    assert line in render(findings, width=120)
    assert exit_code(findings) == ExitCode.OK


def test_a_container_without_a_limit_is_not_mentioned(monkeypatch):
    monkeypatch.setattr(doctor.selection, "free_container_bytes", lambda: [2**63 - 1])
    assert doctor._find_memory().container is None


def test_every_extra_of_the_project_is_known_to_the_doctor():
    assert set(EXTRAS) == set(PYPROJECT["optional-dependencies"])


def test_every_requirement_of_the_project_is_looked_at():
    names = {requirement.partition(">=")[0] for requirement in PYPROJECT["dependencies"]}
    assert names | {"jaxlib"} == set(PACKAGES)
