"""The benchmarks run, on models too small to say anything, and their arithmetic is right."""

import csv
import dataclasses
import importlib.metadata
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import pegprof
from benchmarks import (
    batch_scaling,
    engine,
    gate_power,
    gate_power_text,
    host_memory,
    models,
    optimizer_step,
    rates,
    schedules,
    timing,
    zoo_targets,
    zoo_verdicts,
)
from benchmarks.command import write_csv
from benchmarks.engine_bars import check_bars
from benchmarks.engine_results import Cell, Results, Row
from pegprof.compare.gate import pass_against
from pegprof.compare.limits import LimitTable
from pegprof.errors import PegprofError
from pegprof.models.problem import load_problem
from pegprof.result.samples import count_processes, ratio_to_grad
from pegprof.result.settings import METHODS
from pegprof.targets.rates import CPU, Rates
from tests.compare.baselines import BASELINE
from tests.compare.simulations import first, simulate
from tests.result.results import GRAD, SURGERY
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
LINEAR = """
import jax, jax.numpy as jnp, pegprof
linear = pegprof.Problem(
    name="linear",
    init=lambda key: {"w": jax.random.normal(key, (4, 2))},
    loss=lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]) ** 2),
    batch=lambda key, B: jax.random.normal(key, (B, 4)),
)
"""


def invoke(module, *arguments):
    app = engine.typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(module.main)
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    """The spec of a tiny model in a user's file."""
    path = tmp_path_factory.mktemp("models") / "linear.py"
    path.write_text(LINEAR, encoding="utf-8")
    return f"{path}:linear"


def tiny_row(model="tiny", *, time=1.0, other=1.0, temp=100, error=0.0, kinds=()):
    """A row as if it had been measured: 100 bytes and one second for grad, a largest parameter of 50 bytes."""

    def cell(ratio, temp_bytes, error=None):
        timed = timing.Timing(ratios=(ratio,), times_s=(ratio,), runs=1)
        program = timing.Program(run=lambda: None, compile_s=1.0, temp_bytes=temp_bytes)
        return Cell(program=program, timing=timed, error=error)

    problem = pegprof.Problem(name=model, init=None, loss=None, batch=None)
    return Row(
        model=models.Model(name=model, problem=problem, batch=8, kinds=frozenset(kinds)),
        stats=("mean", "second_moment"),
        cells={"grad": cell(1.0, 100), "vmap": cell(other, 100), "surgery": cell(time, temp, error)},
        plan=None,
        plan_s=None,
        largest_parameter_bytes=50,
        parameters=1,
    )


def missed(*rows, stats=("mean", "second_moment")):
    return check_bars(Results(rows=rows, stats=stats)).missed


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_benchmark_has_help(program):
    result = invoke(importlib.import_module(f"benchmarks.{program}"), "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_a_benchmark_runs_as_a_file_and_says_what_is_wrong():
    command = [sys.executable, FOLDER / "engine.py", "--models", "dence"]
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2
    assert "did you mean 'dense'?" in done.stderr


def test_the_readme_lists_every_program_and_model():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert sorted(first_cells) == sorted([*(f"{name}.py" for name in PROGRAMS), *models.MODELS])


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_takes_a_batch_and_a_bare_example(name):
    problem = models.MODELS[name]().problem
    params, batch = problem.abstract_params(), problem.abstract_batch(2)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    assert not problem.keep_batch_dim
    for data in (batch, example):
        assert jax.eval_shape(problem.loss, params, data).shape == ()


@pytest.mark.parametrize("name", ["depthwise", "lstm", "vit", "resnet"])
def test_the_examples_of_our_own_models_do_not_interact(name):
    problem = models.MODELS[name]().problem
    draw = np.random.default_rng(0).normal
    params = jax.tree.map(lambda x: 0.1 * draw(size=x.shape).astype(x.dtype), problem.abstract_params())
    batch = problem.batch(jax.random.key(1), 2)
    apart = jax.jit(jax.vmap(problem.loss, in_axes=(None, 0)))(params, batch)
    assert jax.jit(problem.loss)(params, batch) == pytest.approx(float(jnp.mean(apart)), rel=1e-4)


@pytest.fixture
def patience(monkeypatch):
    """Nothing is too slow at its first run: among other tests a run of microseconds can take any time."""
    monkeypatch.setattr(engine, "TOO_SLOW", math.inf)


@pytest.mark.usefixtures("patience")
def test_engine_writes_a_row_for_each_model_and_method_and_the_means(linear, tmp_path):
    path = tmp_path / "engine.csv"
    result = invoke(engine, "--models", linear, "--batch", 8, "--rounds", 2, "--repeats", 2, "--csv", path)
    assert result.exit_code == 0
    assert "geometric mean" in result.output
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert [row["method"] for row in rows] == list(engine.METHODS) * 2
    by_method = {row["method"]: row for row in rows if row["model"] == linear}
    assert float(by_method["grad"]["time_ratio"]) == 1
    assert by_method["micro_grad_16"]["reason"] == "16 does not divide 8"
    ours = by_method["surgery"]
    repeats = [float(ratio) for ratio in ours["time_ratio_by_repeat"].split(";")]
    assert len(repeats) == 2
    assert float(ours["time_ratio"]) == pytest.approx(sum(repeats) / 2, abs=1e-3)  # the median of two
    assert float(ours["max_rel_error"]) < 1e-5
    assert re.fullmatch(r"\w+ 1", ours["strategies"])


@pytest.mark.usefixtures("patience")
def test_engine_sends_the_tables_to_stderr_when_stdout_is_the_csv(linear):
    result = invoke(engine, "--models", linear, "--methods", "surgery", "--rounds", 1, "--repeats", 1, "--csv", "-")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("model,batch")
    assert len(lines) == 1 + 2 * 2
    assert "geometric mean" in result.stderr


def test_methods_always_have_grad_and_micro_grad_is_all_sizes():
    assert engine.find_methods("surgery") == ["grad", "surgery"]
    assert engine.find_methods("micro_grad,vmap") == ["grad", "vmap", "micro_grad_1", "micro_grad_4", "micro_grad_16"]
    with pytest.raises(PegprofError, match="did you mean 'surgery'"):
        engine.find_methods("surgeri")


def test_a_row_within_the_bars_misses_none():
    assert missed(tiny_row(time=1.1, other=1.0, temp=150)) == []


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (dict(time=1.7, other=2.0), "time ÷ grad: 1.7"),
        (dict(time=1.25, other=2.0, kinds=["convolution"]), "CNN and depthwise: 1.25"),
        (dict(time=0.95, kinds=["transformer", "T≥D"]), "T ≥ D: 0.95"),
        (dict(time=1.15, other=1.0), "best of vmap and micro_grad: 1.15"),
        (dict(temp=151), "temporaries"),
        (dict(error=0.01), "error of the statistics: 0.01"),
        (dict(error=math.nan), "error of the statistics: nan"),
    ],
)
def test_each_bar_is_missed_by_what_is_above_it(row, what):
    (text,) = missed(tiny_row(**row))
    assert what in text


def test_the_bar_on_the_mean_is_on_the_geometric_mean():
    fast, slow = tiny_row("fast", time=1.0, other=2.0), tiny_row("slow", time=1.5, other=2.0)
    assert [text.split(":")[0] for text in missed(fast, slow)] == ["time ÷ grad, geometric mean"]
    assert missed(fast, tiny_row("slow", time=1.3, other=2.0)) == []


def test_norms_have_a_bar_of_their_own():
    row = tiny_row(time=1.4, other=2.0, kinds=["transformer"])
    (text,) = missed(row, stats=("norm",))
    assert "of norms, transformers: 1.4" in text


def test_surgery_that_could_not_be_timed_misses_its_bars():
    row = tiny_row()
    row.cells["surgery"] = Cell(reason="skipped: 70× at its first run")
    assert any("time ÷ grad: inf" in text for text in missed(row))


def test_a_ratio_is_of_two_runs_of_the_same_round():
    runs = {"grad": lambda: None, "slow": lambda: None}
    schedule = timing.Schedule(rounds=6, every={"grad": 1, "slow": 3})
    found = timing.time_rounds(runs, "grad", schedule, repeats=2)
    assert found["grad"].ratios == (1.0, 1.0)
    assert (found["grad"].runs, found["slow"].runs) == (12, 4)


def test_slow_programs_run_in_few_rounds_but_in_one_at_least():
    schedule = timing.make_schedule({"grad": 1.0, "slow": 50.0}, "grad", rounds=9, seconds=1)
    assert schedule.every == {"grad": 1, "slow": 9}
    assert timing.make_schedule({"grad": 1.0, "slow": 50.0}, "grad", rounds=None, seconds=1).rounds == timing.MIN_ROUNDS


def sweep(grad, ours, axis="batch"):
    def points(values):
        return [batch_scaling.Point(size=n, time_s=t, temp_bytes=int(1000 * t)) for n, t in values.items()]

    return batch_scaling.Sweep(model="tiny", axis=axis, points={"grad": points(grad), "surgery": points(ours)})


def test_a_slope_leaves_out_what_is_paid_once():
    found = sweep({8: 1.8, 16: 2.6, 32: 4.2}, {8: 5.8, 16: 6.6, 32: 8.2})
    assert found.slope("grad", "time_s") == pytest.approx(0.1)
    assert found.slope_ratio("time_s") == pytest.approx(1.0)
    assert batch_scaling.missed_bars([found]) == []


def test_a_slope_above_that_of_grad_is_missed_and_one_below_is_not():
    steep, flat = {8: 8.0, 16: 16.0}, {8: 4.0, 16: 8.0}
    assert len(batch_scaling.missed_bars([sweep(flat, steep)])) == 2  # time and temporaries
    assert batch_scaling.missed_bars([sweep(steep, flat), sweep(flat, steep, axis="seq_len")]) == []


def test_batch_scaling_draws_both_files_and_writes_the_slopes(tmp_path):
    sweeps = [sweep({8: 1.0, 16: 2.0}, {8: 1.5, 16: 2.5}), sweep({8: 1.0}, {8: 1.0}, axis="seq_len")]
    paths = batch_scaling.draw(sweeps, tmp_path / "figure")
    assert [path.name for path in paths] == ["figure.png", "figure.svg"]
    assert all(path.stat().st_size > 1000 for path in paths)
    rows = batch_scaling.csv_rows(sweeps)
    assert len(rows) == 6
    assert [row["time_slope_ratio"] for row in rows[:4]] == [None, None, pytest.approx(1.0), pytest.approx(1.0)]


def test_a_sweep_measures_both_methods_at_each_size(linear):
    problem = load_problem(linear)
    found = batch_scaling.measure_sweep("linear", "batch", [2, 4], lambda B: (problem, B), rounds=1)
    assert [[point.size for point in points] for points in found.points.values()] == [[2, 4], [2, 4]]


def test_peers_says_what_is_missing_and_how_to_install_it(monkeypatch):
    peers = importlib.import_module("benchmarks.peers")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    result = invoke(peers)
    assert result.exit_code == 0
    assert "BackPACK is not installed: pip install backpack-for-pytorch" in result.output


def test_rates_are_printed_as_a_line_of_the_table():
    found = dataclasses.replace(CPU, matmul=9.99e10, steps=2e5, cache_bytes=2**20)
    text = rates.format_rates(found)
    assert text.startswith("Rates(matmul=1e11, ")
    assert eval(text).steps == 2e5
    assert eval(text).cache_bytes == 2**20


def test_every_rate_of_the_planner_has_a_measurement():
    fields = {field.name for field in dataclasses.fields(Rates)}
    assert set(rates.MEASURES) == fields - {"cache_bytes", "cache_bandwidth", "overlaps"}  # those of an accelerator
    assert rates.measure_steps(1) > 0


def test_a_cache_that_cores_share_counts_once(tmp_path):
    for core, shared in (("cpu0", "0-1"), ("cpu1", "0-1"), ("cpu2", "2")):
        index = tmp_path / core / "cache/index2"
        index.mkdir(parents=True)
        for name, text in (("type", "Unified"), ("level", "2"), ("size", "512K"), ("shared_cpu_list", shared)):
            (index / name).write_text(f"{text}\n")
    assert rates.find_caches(tmp_path) == {2: 2**20}


def test_zoo_verdicts_writes_the_verdict_or_why_there_is_none(linear, tmp_path):
    files = {"csv": tmp_path / "z.csv", "markdown": tmp_path / "z.md"}
    options = [option for name, path in files.items() for option in (f"--{name}", path)]
    done = invoke(zoo_verdicts, "--models", f"{linear},no-such-model", "--batch", "4", *options)
    assert done.exit_code == 0
    with files["csv"].open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["model"], first["parameters"], first["dominates"], first["by_the_rule"]) == (
        "linear",
        "8",
        "parameters" if int(first["activation_bytes_per_example"] or 0) < 32 else "activations",
        "parameters",  # T = 1, D = 2
    )
    assert float(first["vmap_peak_ratio"]) > 0
    assert first["surgery_microbatch_size"] == "4"
    assert (second["dominates"], second["reason"]) == ("", "there is no model 'no-such-model'")
    text = files["markdown"].read_text(encoding="utf-8")
    assert "| linear | 8 | 32 B |" in text
    assert "- no-such-model: there is no model 'no-such-model'" in text


def test_zoo_targets_compiles_nothing_that_is_known_and_says_how_often_activations_dominate(tmp_path):
    files = ["--csv", tmp_path / "z.csv", "--figure", tmp_path / "z.png"]
    arguments = ["--models", "linear", "--targets", "cpu", "--batch", "4", *files]
    cells = dict.fromkeys(zoo_targets.COLUMNS, "")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    known = [
        {
            **cells,
            **versions,
            "model": "linear",
            "target": "cpu",
            "batch": "4",
            "method": method,
            "status": "ok",
            "pegprof": pegprof.__version__,
            "peak_bytes": "4096",
            "peak_ratio": "1.0",
            "capacity_bytes": "8192",
            "activations_dominate": "true",
        }
        for method in METHODS
    ]
    write_csv(known, str(tmp_path / "z.csv"))
    done = invoke(zoo_targets, *arguments)
    assert done.exit_code == 0, done.output
    assert "cpu: activations dominate for 1 of 1 models" in done.output
    assert {path.suffix for path in tmp_path.glob("z.*")} == {".csv", ".png", ".svg"}
    older = [{**row, "jaxlib": "0.1"} for row in known]
    assert zoo_targets.is_known(known, "linear", "cpu", 4)
    assert not zoo_targets.is_known(older, "linear", "cpu", 4)
    assert not zoo_targets.is_known(known[1:], "linear", "cpu", 4)


def test_zoo_targets_compiles_a_method_anew_and_leaves_the_others_as_they_are(tmp_path):
    files = ["--csv", tmp_path / "z.csv", "--figure", tmp_path / "z.png"]
    arguments = ["--models", "mlp", "--targets", "cpu", "--batch", "4", *files]
    assert invoke(zoo_targets, *arguments).exit_code == 0
    first = zoo_targets.read_rows(tmp_path / "z.csv")
    marked = [row | {"peak_bytes": "1", "temp_bytes": "2"} if row["method"] == "surgery" else row for row in first]
    write_csv(marked[::-1], str(tmp_path / "z.csv"))
    done = invoke(zoo_targets, *arguments, "--again", "surgery")
    assert done.exit_code == 0, done.output
    again = zoo_targets.read_rows(tmp_path / "z.csv")
    changing = {"compile_s", "timestamp", "capacity_bytes"}
    assert [{k: v for k, v in row.items() if k not in changing} for row in again] == [
        {k: v for k, v in row.items() if k not in changing} for row in first
    ]
    assert [row["timestamp"] for row in again[:-1]] == [row["timestamp"] for row in first[:-1]]


def test_zoo_targets_reads_what_was_written_before_there_were_the_last_columns(tmp_path):
    full = [{name: name for name in zoo_targets.COLUMNS}]
    write_csv([{name: row[name] for name in zoo_targets.COLUMNS[:-2]} for row in full], str(tmp_path / "older.csv"))
    write_csv([{"another": "1", **full[0]}], str(tmp_path / "other.csv"))
    (row,) = zoo_targets.read_rows(tmp_path / "older.csv")
    assert row == full[0] | dict.fromkeys(zoo_targets.COLUMNS[-2:], "")
    assert zoo_targets.read_rows(tmp_path / "other.csv") == []


def simulated_gate(rng, **machine):
    """A gate on two revisions whose times are simulated, by how much slower the second one is."""

    def measured(samples, settings):
        method, grad = samples[1], samples[0]
        rows = [
            dataclasses.replace(row, time_ratio=ratio_to_grad(each, grad), processes=count_processes(each))
            for row, each in ((GRAD, grad), (SURGERY, method))
        ]
        return dataclasses.replace(
            BASELINE, rows=tuple(rows), settings=settings, samples={(64, "grad"): grad, (64, "surgery"): method}
        )

    def gate(work):
        everything = [simulate(rng, slowdown=slowdown, **machine) for slowdown in (1.0, 1 + work / 1000)]

        def measure(settings, check, enough):
            for processes in range(1, settings.processes + 1):
                before, after = (measured(first(times, processes), settings) for times in everything)
                if enough(before, after, 64):
                    break
            return before, after

        limits = LimitTable(flags={"time": True})
        return pass_against(BASELINE.settings, revision="HEAD", limits=limits, measure=measure)

    return gate


def test_gate_power_gates_programs_that_are_known_to_be_slower():
    quiet = simulated_gate(np.random.default_rng(0), spread=0.02, noise=0.02, tails="normal")
    assert gate_power.calibrate(quiet) == pytest.approx(0.001, rel=0.2)
    about = {"model": "m", "batch": 64, "load": 0, "how": "against"}
    rows = list(gate_power.run_gates(quiet, (1.0, 1.1, 1.2, 1.5), 20, unit=0.001, about=about))
    found = {group["slowdown"]: group["failed"] for group in gate_power_text.summarise(rows)}
    assert found[1.0] == 0
    assert found[1.1] <= 2
    assert min(found[1.2], found[1.5]) >= 18
    assert gate_power_text.find_missed(rows) == []
    assert [row["gate"] for row in rows] == [n for n in range(1, 21) for _ in range(4)]  # slowdowns take turns
    assert {row["outcome"] for row in rows} <= {"same", "worse", "unresolved"}


def made_rows(outcomes, **fields):
    about = {"model": "m", "how": "against", "load": 0, "slowdown": 1.0, "change": 0.0, "took_s": 60.0}
    return [{**about, "outcome": outcome, **fields} for outcome in outcomes]


@pytest.mark.parametrize(
    ("rows", "missed"),
    [
        (made_rows(["same"] * 9 + ["unresolved"]), []),
        (made_rows(["same"] * 9 + ["worse"]), ["1 of 10 gates failed though nothing had changed"]),
        (made_rows(["worse"] * 9 + ["unresolved"], slowdown=1.2), []),
        (made_rows(["worse"] * 8 + ["unresolved"] * 2, slowdown=1.2), ["only 8 of 10 gates failed"]),
        (made_rows(["unresolved"] * 10, slowdown=1.2, load=1), []),  # there the bar is 1.3
        (made_rows(["unresolved"] * 10, slowdown=1.3, load=1), ["only 0 of 10 gates failed"]),
        (made_rows(["same"], took_s=121.0), ["a gate took 121 s"]),
    ],
)
def test_gate_power_says_which_bars_are_missed(rows, missed):
    assert [text.split(": ")[1] for text in gate_power_text.find_missed(rows)] == missed


def test_gate_power_goes_on_where_it_was_and_draws_all_of_it(tmp_path):
    path = tmp_path / "gates.csv"
    assert gate_power.read_rows(path) == []
    write_csv([*made_rows(["same"]), *made_rows(["worse"], slowdown=1.5)], str(path))
    rows = gate_power.read_rows(path)
    assert [group["failed"] for group in gate_power_text.summarise(rows)] == [0, 1]
    gate_power_text.draw(rows, tmp_path / "gates.png")
    assert (tmp_path / "gates.png").stat().st_size > 1000
    assert gate_power_text.render(rows).row_count == 2


def test_the_program_of_gate_power_is_slower_for_a_single_example_only_and_has_the_same_gradient(tmp_path):
    def load(work):
        folder = tmp_path / str(work)
        folder.mkdir()
        gate_power.write_program(folder, "mlp", work=work)
        return load_problem(f"{folder / gate_power.FILE}:slowed")

    plain, slowed = load(0), load(50)
    params, batch = plain.init(jax.random.key(0)), plain.batch(jax.random.key(1), 2)
    alone = jax.tree.map(lambda x: x[:1], batch)
    loops = [
        [str(jax.make_jaxpr(jax.grad(problem.loss))(params, data)).count("tanh") for data in (batch, alone)]
        for problem in (plain, slowed)
    ]
    assert loops[0][0] == loops[0][1] == loops[1][0] < loops[1][1]
    found = [jax.tree.leaves(jax.jit(jax.grad(problem.loss))(params, alone)) for problem in (plain, slowed)]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_bar_that_is_met_says_by_how_much():
    met = check_bars(Results(rows=[tiny_row(time=0.8), tiny_row(time=1.2)], stats=("mean", "second_moment"))).met
    assert "time ÷ grad: at most 1.2, for tiny; the bar is 1.6" in met


def test_host_memory_compares_what_was_measured_with_xlas_figure_for_the_same_batch():
    row = pegprof.result.result.Row(
        model="m",
        batch=64,
        stats="mean",
        method="vmap",
        target="cpu",
        evidence="measured",
        status="ok",
        peak_bytes=64 * 2**30,
        host_peak_bytes=5 * 2**30,
        measured_batch=4,
        measured_batch_peak_bytes=4 * 2**30,
    )
    far = host_memory.summarise(row)
    near = host_memory.summarise(dataclasses.replace(row, host_peak_bytes=4 * 2**30))
    unknown = host_memory.summarise(dataclasses.replace(row, host_peak_bytes=None, reason="refused"))
    assert (far.batch, far.difference, far.agrees) == (4, 0.25, False)
    assert (near.difference, near.agrees, unknown.agrees, unknown.reason) == (0.0, True, None, "refused")
    text = host_memory.render([far, near, unknown])
    assert "1 of 2 do." in text
    assert "| m | vmap | 4 | 4.0 GiB | 5.0 GiB | +25.0% | no |" in text
    assert "- m, vmap: refused" in text


def test_host_memory_keeps_what_its_files_have_of_other_models(tmp_path):
    compared = host_memory.Compared(model="m", method="vmap", batch=4, xla_bytes=5, difference=0.25, agrees=False)
    unknown = host_memory.Compared(model="n", method="grad", reason="refused", xla_flags="--flag")
    write_csv([dataclasses.asdict(each) for each in (compared, unknown)], str(tmp_path / "h.csv"))
    assert host_memory.read_rows(tmp_path / "h.csv") == [compared, unknown]
    files = ["--csv", tmp_path / "h.csv", "--markdown", tmp_path / "h.md"]
    done = invoke(host_memory, "--models", "n", *files)
    assert done.exit_code == 0, done.output
    first, *others = host_memory.read_rows(tmp_path / "h.csv")
    assert first == compared
    assert {(each.model, each.reason) for each in others} == {("n", "there is no model 'n'")}
    assert "| m | vmap | 4 |" in (tmp_path / "h.md").read_text()


@pytest.mark.slow
def test_host_memory_measures_a_users_model_and_says_what_it_cannot(linear, tmp_path):
    files = ["--csv", tmp_path / "h.csv", "--markdown", tmp_path / "h.md"]
    done = invoke(host_memory, "--models", f"{linear},no-such-model", "--batch", "4", "--check", *files)
    assert done.exit_code == 0, done.output
    with (tmp_path / "h.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found, missing = rows[:4], rows[4:]
    assert [(row["method"], row["agrees"]) for row in found] == [(method, "True") for method in METHODS]
    assert {row["reason"] for row in missing} == {"there is no model 'no-such-model'"}


def test_optimizer_step_writes_a_row_for_each_step_and_checks_the_bar(linear, tmp_path):
    path = tmp_path / "steps.csv"
    options = ("--batch", "4,8", "--optimizers", "micro_adam,sign_ema", "--rounds", 2, "--repeats", 1)
    result = invoke(optimizer_step, "--models", linear, *options, "--csv", path, "--check")
    assert result.exit_code == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["batch"], row["step"]) for row in rows[:4]] == [
        ("4", "adam by grad"),
        ("4", "micro_adam by surgery"),
        ("4", "sign_ema by surgery"),
        ("4", "micro_adam by vmap"),
    ]
    assert len(rows) == 8
    assert float(rows[0]["time_ratio"]) == 1.0


def test_schedules_are_timed_one_row_each_and_the_planner_has_chosen_one_of_them(linear, tmp_path):
    path = tmp_path / "schedules.csv"
    result = invoke(schedules, "--models", linear, "--batch", 4, "--rounds", 2, "--repeats", 1, "--csv", path)
    assert result.exit_code == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["microbatch_size"] for row in rows] == ["4", "2", "1"]
    assert [row["chosen"] for row in rows].count("True") == 1
    assert "choice ÷ best, geometric mean" in result.output


def test_a_step_of_micro_adam_above_the_bar_is_missed_and_others_have_none():
    facts = {"batch": 64, "time_s": 1.0, "ratios": "", "runs": 1, "temp_bytes": 1, "compile_s": 1.0, "rounds": 1}
    rows = [
        optimizer_step.Row(model=model, step=f"{step} by surgery", time_ratio=ratio, jaxlib="", **facts)
        for model, step, ratio in [
            ("transformer-tiny", "micro_adam", 1.16),
            ("transformer-tiny", "micro_adam", 1.14),
            ("transformer-tiny", "adam_mix", 2.0),
            ("cnn", "micro_adam", 2.0),
        ]
    ]
    assert optimizer_step.missed_bars(rows) == [
        "micro_adam by surgery on transformer-tiny, batch 64: 1.16, the bar is 1.15"
    ]


def test_an_optimizer_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(PegprofError, match="did you mean 'micro_adam'"):
        invoke(optimizer_step, "--optimizers", "micro_adm")
