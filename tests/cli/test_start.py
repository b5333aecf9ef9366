"""What every command has in common: help, usage, and what its process does not load."""

import inspect

import pytest

import pegprof
from pegprof.cli import app
from tests.cli.commands import GRAD_ALONE, run_python
from tests.waiting import children_cpu_s


def test_help_takes_less_than_400_ms(pegprof_in):
    """Of the processor: it waits for nothing, and the machine may be busy with other tests."""
    times_s = []
    for _ in range(5):
        before_s = children_cpu_s()
        assert pegprof_in("--help").returncode == 0
        times_s.append(children_cpu_s() - before_s)
    assert min(times_s) < 0.4


def test_help_loads_neither_jax_nor_pandas(tmp_path):
    code = (
        "import sys; from pegprof.cli import app; app(['run', '--help'], standalone_mode=False); "
        "sys.exit(bool({'jax', 'pandas', 'numpy', 'rich'} & set(sys.modules)))"
    )
    assert run_python(code, tmp_path).returncode == 0


def test_version_is_data_on_stdout(pegprof_in):
    assert pegprof_in("--version").stdout == f"pegprof {pegprof.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "mlp", "--batch", "many"], "'many' is not a batch size"),
        (["run", "mlp", "--memory-limit", "20"], "hint: write a number and a unit: 20G or 20GiB"),
        (["run", "mlp", "--time-limit", "soon"], "hint: write it like 90s, 10m or 1h"),
        (["run", "mlp", "--time-limit", "0.5"], "--time-limit 0.5 is less than a second"),
        (["inspect", "mlp", "--memory-limit", ""], "'' is not an amount of memory"),
        (["run", "mlp", "--target", ""], "--target: the list is empty"),
        (["run", "mlp", "--set", "width"], "--set width has no value"),
        (["run", "mlp", "--set", "width=8", "--set", "width=16"], "--set gives width twice"),
        (["fit", "mlp", "--target", "tpu-v5e,h100"], "fit takes one target, and tpu-v5e,h100 are 2"),
        (["fit", "mlp", "--batch", "8", "--up-to", "4"], "--batch asks about one batch and --up-to about many"),
        (["run", "mlp", "--methods", "grad,grad"], "--methods: grad is named twice"),
        (
            ["run", "mlp", "--runs", "0"],
            "error: --runs: input should be greater than or equal to 1\nhint: pegprof run --help",
        ),
        (["run", "mlpp"], "hint: did you mean 'mlp'?"),
        (["run", "mlp", "--step", "micro_adma"], "hint: did you mean 'micro_adam'?"),
        (["fit", "mlp", "--step", "micro_adam", "--stats", "mean"], "hint: leave the statistics out"),
        (["run", "mlp", "--export-csv", "-", "--export-json", "-"], "cannot both go to stdout"),
        (["run", "mlp", "--export-csv", "x.csv", "--no-csv"], "contradict each other"),
        (["run", "mlp", "--export-json", "/proc/x.json"], "error: cannot write /proc/x.json"),
        (["experiment", "memory-baseline", "--out", "/proc/x"], "hint: name another folder with --out"),
        (["inspect", "mlp", "--stats", "men"], "hint: did you mean 'mean'?"),
        (["run", "mlp", "--stats", "mean,nrm"], "--stats: unknown statistic 'nrm'\nhint: did you mean 'norm'?"),
        (["fit", "mlp", "--methods", "surgry"], "--methods: unknown method 'surgry'\nhint: did you mean 'surgery'?"),
        (["run", "mlp", "--bacth", "8"], "error: pegprof run has no option --bacth\nhint: did you mean '--batch'?"),
        (["run"], "error: missing argument 'MODEL'\nhint: pegprof run --help"),
        (["compare", "a.json"], "compare takes two files or more"),
        (["gate", "b.json", "--junit", "j.xml"], "hint: it is now --export-junit FILE"),
        (["inspect", "mlp", "--json"], "hint: it is now --export-json FILE, with - for stdout"),
        (["list", "--json"], "hint: it is now --export-json FILE, with - for stdout"),
        (["compare", "a.json", "b.json", "--markdown"], "hint: it is now --export-markdown FILE, with - for stdout"),
        (["lits"], "error: there is no command 'lits'\nhint: did you mean 'list'?"),
        (["--debg"], "error: pegprof has no option --debg\nhint: did you mean '--debug'?"),
        (["cache", "empty"], "hint: known: info, clear"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_said_on_stderr_with_exit_code_2(pegprof_in, arguments, words):
    done = pegprof_in(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback_and_changes_no_exit_code(pegprof_in):
    done = pegprof_in("run", "mlp", "--batch", "many", "--debug")
    assert "Traceback" in done.stderr
    assert done.returncode == 2


def test_every_command_can_show_tracebacks():
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    for command in (command for group in groups for command in group.registered_commands):
        assert "debug" in inspect.signature(command.callback).parameters


@pytest.mark.parametrize("arguments", [[*GRAD_ALONE, "--no-csv"], ["inspect", "mlp"], ["doctor"]], ids=lambda a: a[0])
def test_the_process_that_a_user_starts_does_not_even_import_jax(tmp_path, arguments):
    code = (
        f"import sys; from pegprof.cli import app; code = app({arguments!r} + ['--quiet'], standalone_mode=False); "
        "sys.exit(code or 9 * ('jax' in sys.modules))"
    )
    done = run_python(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())
