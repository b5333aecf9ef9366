"""The command line: parse, call, print. Whatever is heavy to import is imported inside the command that needs it.

Data goes to stdout, talk to stderr.
"""

import contextlib
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import pegprof
from pegprof.errors import ExitCode, PegprofError, first_line
from pegprof.profiling.result import DEFAULT_BATCH, Result
from pegprof.streams import open_streams

if TYPE_CHECKING:
    from pegprof.profiling.output import Exports

MOST_BATCH = 4096
"""Up to which ``fit`` looks, if not told otherwise."""

# Typer's rich help would take a third of a second to load.
app = typer.Typer(
    name="pegprof",
    help="What do per-example gradient statistics cost, compared with the plain mini-batch gradient?",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)


def main() -> NoReturn:
    """The entry point: whatever goes wrong becomes words and an exit code."""
    open_streams()
    try:
        try:
            app(prog_name="pegprof")
        finally:
            sys.stdout.flush()  # here, where it can be said that something cannot be written
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        sys.exit(_explain(error))
    sys.exit(ExitCode.OK)


def _explain(error: Exception) -> ExitCode:
    """Says what went wrong, and returns what to end with."""
    if not isinstance(error, PegprofError):
        what = f"this is a bug in pegprof, or something is wrong with this machine: {first_line(error)}"
        error = PegprofError(what, hint="--debug shows the traceback", exit_code=ExitCode.UNMEASURED)
    if "--debug" in sys.argv:
        traceback.print_exc()
    else:
        _say(f"error: {error}")
    return error.exit_code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"pegprof {pegprof.__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# What several commands take.
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A name (see list), package.module:name or file.py:name (see new).")
]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the model.")]
SeqLen = Annotated[int | None, typer.Option(min=1, help="The same as --set seq_len=N.")]
Dtype = Annotated[str | None, typer.Option(metavar="float32|bfloat16", help="The same as --set dtype=...")]
Methods = Annotated[str, typer.Option(help="Which methods.")]
MicrobatchSize = Annotated[int, typer.Option(min=1, help="Examples at a time in the method microbatch.")]
Stats = Annotated[
    str | None, typer.Option(metavar="NAME[,NAME]...", help="Which statistics. [default: mean,second_moment]")
]
Step = Annotated[
    str | None,
    typer.Option(metavar="adam|micro_adam|...", help="Whole training steps of this optimizer, its state included."),
]
Targets = Annotated[
    str | None,
    typer.Option("--target", metavar="NAME[,NAME]...", help="Compile for these devices (see targets); else this one."),
]
Mesh = Annotated[
    str | None,
    typer.Option(metavar="data=16,fsdp=4", help="The mesh of a slice (--target tpu-v5p:4x4x4); else all along data."),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Compile again for devices that are not here, whatever is known.")
]
NoKernels = Annotated[bool, typer.Option("--no-kernels", help="Plan without fused kernels, on a TPU or an NVIDIA GPU.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks, and all that the model prints.")]
Tracebacks = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.command()
def run(
    model: Model,
    batch: Annotated[str, typer.Option(metavar="N[,N]...", help="Batch sizes.")] = str(DEFAULT_BATCH),
    option: Set = None,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    target: Targets = None,
    mesh: Mesh = None,
    methods: Methods = "grad,vmap,microbatch,surgery",
    stats: Stats = None,
    step: Step = None,
    microbatch_size: MicrobatchSize = 1,
    warmup: Annotated[int, typer.Option("--warmup", "-w", min=0, help="Runs that do not count.")] = 1,
    runs: Annotated[
        int | None, typer.Option("--runs", "-r", min=1, help="Runs that count; 3 to 50 if not given.")
    ] = None,
    time_limit: Annotated[
        float, typer.Option(metavar="S", min=1, help="Seconds for everything; the first compiles are finished even so.")
    ] = 585,
    memory_limit: Annotated[str | None, typer.Option(metavar="20GiB", help="Refuse what needs more.")] = None,
    no_time: Annotated[bool, typer.Option("--no-time", help="Compile only: memory and verdict.")] = False,
    seed: Annotated[int, typer.Option(help="Of parameters and data.")] = 0,
    export_csv: Annotated[str | None, typer.Option(metavar="FILE", help="The rows as CSV; - is stdout.")] = None,
    export_json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Everything, samples and plan too, as JSON; - is stdout.")
    ] = None,
    export_markdown: Annotated[
        str | None, typer.Option(metavar="FILE", help="A report for a pull request, as Markdown; - is stdout.")
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not compare the methods' statistics, nor check the examples.")
    ] = False,
    no_csv: Annotated[bool, typer.Option("--no-csv", help="Write no CSV.")] = False,
    no_cache: NoCache = False,
    no_kernels: NoKernels = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure what each method costs on a model.

    Time, memory and whether activations dominate parameters: a table on stdout, or on stderr when an export goes to
    stdout. A CSV goes to reports/MODEL-bBATCH-TARGET.csv unless --export-csv or --no-csv says otherwise.
    """
    from pegprof.profiling import arguments, measure, output, progress, terminal, units
    from pegprof.profiling.result import Settings

    settings = Settings(
        model=model,
        options=arguments.parse_options(option or (), seq_len=seq_len, dtype=dtype),
        batches=arguments.parse_batches(batch),
        methods=arguments.parse_names(methods, "--methods"),
        stats=arguments.parse_stats(stats, step),
        step=step,
        microbatch_size=microbatch_size,
        time=not no_time,
        warmup=warmup,
        runs=runs,
        time_limit_s=time_limit,
        memory_limit_bytes=None if memory_limit is None else units.parse_bytes(memory_limit),
        check=not no_check,
        seed=seed,
        targets=arguments.parse_targets(target),
        cache=not no_cache,
        kernels=not no_kernels,
        mesh=arguments.parse_mesh(mesh),
    )
    with progress.listen(quiet=quiet) as talk:
        chosen = measure.find_targets(settings, talk=talk)
    exports = output.choose_exports(
        {"csv": export_csv, "json": export_json, "markdown": export_markdown},
        no_csv=no_csv,
        default_csv=output.default_csv_path(settings, [each.name for each in chosen]),
    )
    exports.check_writable()
    saver = output.Saver(exports)
    with progress.listen(quiet=quiet) as talk, contextlib.suppress(KeyboardInterrupt):
        measure.measure(
            settings,
            chosen=chosen,
            talk=talk,
            save=saver,
            preview=lambda result: talk(terminal.render_preview(result, **_shape_of(sys.stderr))),
            debug=debug,
        )
    result = saver.latest
    if result is None:  # interrupted before there was anything
        raise typer.Exit(ExitCode.INTERRUPTED)
    _show(result, lambda **shape: terminal.render_terminal(result, **shape), exports, quiet=quiet)
    if saver.failure:
        raise saver.failure
    for path in () if quiet else exports.files.values():
        _say(f"wrote {path}")
    raise typer.Exit(result.exit_code if result.complete else ExitCode.INTERRUPTED)


@app.command()
def fit(
    model: Model,
    target: Annotated[
        str | None, typer.Option(metavar="NAME", help="The device (see targets); else the one that is here.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Say only whether this batch fits.")] = None,
    up_to: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=f"The largest batch to look at. [default: {MOST_BATCH}]")
    ] = None,
    option: Set = None,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    mesh: Mesh = None,
    methods: Methods = "grad,vmap,microbatch,surgery",
    stats: Stats = None,
    step: Step = None,
    microbatch_size: MicrobatchSize = 1,
    memory_limit: Annotated[str | None, typer.Option(metavar="15GiB", help="As if the device had no more.")] = None,
    time_limit: Annotated[float, typer.Option(metavar="S", min=1, help="Seconds for everything.")] = 1800,
    export_csv: Annotated[str | None, typer.Option(metavar="FILE", help="Every compile as CSV; - is stdout.")] = None,
    no_csv: Annotated[bool, typer.Option("--no-csv", help="Write no CSV.")] = False,
    no_cache: NoCache = False,
    no_kernels: NoKernels = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find the largest batch that fits on a device, by compiling for it.

    With --batch it says whether that one fits, and ends with 0 if surgery fits and with 1 if not; where --methods
    leaves surgery out, all must fit. A compile that failed is 3, a time limit that came before the answer 124. Nothing
    is run. A CSV of all that was compiled goes to reports/MODEL-fit-TARGET.csv unless --export-csv or --no-csv says
    otherwise.
    """
    from pegprof.profiling import arguments, fit_text, measure, output, progress, units
    from pegprof.profiling import fit as fitting
    from pegprof.profiling.result import Settings

    if batch and up_to:
        raise PegprofError("--batch asks about one batch and --up-to about many", hint="leave one of them out")
    most = up_to or MOST_BATCH
    settings = Settings(
        model=model,
        options=arguments.parse_options(option or (), seq_len=seq_len, dtype=dtype),
        batches=(batch or min(DEFAULT_BATCH, most),),
        methods=arguments.parse_names(methods, "--methods"),
        stats=arguments.parse_stats(stats, step),
        step=step,
        microbatch_size=microbatch_size,
        time=False,
        time_limit_s=time_limit,
        memory_limit_bytes=None if memory_limit is None else units.parse_bytes(memory_limit),
        targets=arguments.parse_one_target(target),
        cache=not no_cache,
        kernels=not no_kernels,
        mesh=arguments.parse_mesh(mesh),
    )
    with progress.listen(quiet=quiet) as talk:
        (chosen,) = measure.find_targets(settings, talk=talk)
        if batch is None:
            settings, most = fitting.start_at_multiple(settings, chosen, most=most)
        exports = output.choose_exports(
            {"csv": export_csv}, no_csv=no_csv, default_csv=output.fit_csv_path(settings, chosen.name)
        )
        exports.check_writable()
        saver = output.Saver(exports)
        try:
            if batch is None:
                found = fitting.find_largest(settings, chosen, most=most, talk=talk, save=saver, debug=debug)
            else:
                found = fitting.check_fit(settings, chosen, talk=talk, save=saver, debug=debug)
        except KeyboardInterrupt:
            for path in exports.files.values() if saver.latest else ():
                talk(f"wrote {path}, with what was compiled until then")
            raise
    _show(found.result, lambda **shape: fit_text.render_fit(found, **shape), exports, quiet=quiet)
    if saver.failure:
        raise saver.failure
    for path in () if quiet else exports.files.values():
        _say(f"wrote {path}")
    raise typer.Exit(found.exit_code)


@app.command()
def inspect(
    model: Model,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Batch size.")] = 64,
    option: Set = None,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    target: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME]...", help="Plan for these devices (see targets); else this one.")
    ] = None,
    mesh: Mesh = None,
    stats: Stats = None,
    memory_limit: Annotated[str | None, typer.Option(metavar="20GiB", help="Plan for less than is free.")] = None,
    no_kernels: NoKernels = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show a model and its plan; nothing is run.

    The plan is how surgery gets the statistics of each parameter, with the memory that is free.
    """
    from pegprof.profiling import arguments, inspection, progress, units
    from pegprof.profiling.result import Settings

    settings = Settings(
        model=model,
        options=arguments.parse_options(option or (), seq_len=seq_len, dtype=dtype),
        batches=(batch,),
        stats=arguments.parse_stats(stats),
        memory_limit_bytes=None if memory_limit is None else units.parse_bytes(memory_limit),
        targets=arguments.parse_targets(target),
        kernels=not no_kernels,
        mesh=arguments.parse_mesh(mesh),
    )
    with progress.listen(quiet=quiet) as talk:
        found = inspection.inspect_model(settings, talk=talk, debug=debug)
    if as_json:
        print(inspection.to_json(found))
    else:
        print("\n\n".join(inspection.render_inspection(each, **_shape_of(sys.stdout, widest=200)) for each in found))


@app.command(name="targets")
def show_targets(quiet: Quiet = False, debug: Tracebacks = False) -> None:
    """List the devices that --target knows, and which can be compiled for now.

    With their memory as programs can have it, and the line that installs the compilers that are missing.
    """
    from pegprof.profiling import asking, progress, target_list

    with progress.listen(quiet=quiet) as talk:
        listed = target_list.list_targets(asking.find_host(talk))
    print(target_list.render(listed, **_shape_of(sys.stdout)))


@app.command(name="doctor")
def see_doctor(quiet: Quiet = False, debug: Tracebacks = False) -> None:
    """Say what is missing, and how to get it.

    Versions, devices, memory and extras; the exit code is 3 where nothing could be measured.
    """
    from pegprof.profiling import doctor, progress

    with progress.listen(quiet=quiet) as talk:
        findings = doctor.diagnose(doctor.examine(talk))
    print(doctor.render(findings, **_shape_of(sys.stdout)))
    raise typer.Exit(doctor.exit_code(findings))


@app.command(name="list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="All that is known of each, as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """List the models that have a name, the zoo's and those of installed packages.

    With their parameters, how many of them are outside embeddings, the batch and the sequence that run takes by
    default, and whether activations or parameters dominate, by what the trace keeps of an example.
    """
    from pegprof.profiling import catalog, progress

    found = catalog.make_catalog(talk=progress.Lines(sys.stderr), debug=debug)
    for warning in found.warnings:
        _say(f"warning: {warning}")
    print(catalog.render_json(found) if as_json else catalog.render_terminal(found, **_shape_of(sys.stdout)))


@app.command()
def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Its name, like my_model.py.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
    debug: Tracebacks = False,
) -> None:
    """Write a starting file for a model of your own, which runs as it is."""
    from pegprof.starting_file import FUNCTION, write_starting_file

    write_starting_file(file, force=force)
    _say(f"wrote {file}\nnext: pegprof run {shlex.quote(f'{file}:{FUNCTION}')} --batch 32")


@app.command(name="gate")
def gate_baselines(
    baselines: Annotated[list[Path], typer.Argument(metavar="BASELINE...", help="Files of run --export-json.")],
    max_bytes: Annotated[
        str | None, typer.Option(metavar="1%", help="By how much bytes and flops may grow. [default: 1%]")
    ] = None,
    time: Annotated[bool, typer.Option("--time", help="Compare times too, as ratios to grad's.")] = False,
    max_time_ratio: Annotated[
        str | None, typer.Option(metavar="10%", help="By how much such a ratio may grow. [default: 10%]")
    ] = None,
    ceiling: Annotated[
        list[str] | None, typer.Option("--max", metavar="METHOD.COLUMN=X", help="The most that a column may be.")
    ] = None,
    result: Annotated[Path | None, typer.Option(metavar="FILE", help="Compare this; run nothing.")] = None,
    no_fail: Annotated[bool, typer.Option("--no-fail", help="Say what failed, and end with 0 for it.")] = False,
    junit: Annotated[str | None, typer.Option(metavar="FILE", help="The outcome as JUnit XML; - is stdout.")] = None,
    export_json: Annotated[str | None, typer.Option(metavar="FILE", help="The outcome as JSON; - is stdout.")] = None,
    export_markdown: Annotated[
        str | None, typer.Option(metavar="FILE", help="The outcome as Markdown; - is stdout.")
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Fail if a model costs more than its baseline says.

    Repeats the runs that the baselines hold and compares bytes, flops and plans, which are the same in every run; times
    only if asked. The exit code is 1 for a regression, 4 for a baseline of other versions or of another device. Limits
    may stand in pyproject.toml, under [tool.pegprof.gate].
    """
    from pegprof.profiling import ci, gate, gate_report, limits, measure, output, progress

    if result and len(baselines) > 1:
        raise PegprofError("one result cannot be compared with several baselines", hint="name one baseline")
    table = limits.read_limits(
        Path.cwd(), max_bytes=max_bytes, max_time_ratio=max_time_ratio, ceilings=ceiling or (), time=time
    )
    exports = output.choose_exports({"junit": junit, "json": export_json, "markdown": export_markdown})
    exports.check_apart_from([*baselines, *([result] if result else [])])
    exports.check_writable()
    with progress.listen(quiet=quiet) as talk:
        gates, refusals = gate.pass_gates(
            baselines,
            limits=table,
            measure=lambda settings, check: measure.measure(settings, talk=talk, outlined=check, debug=debug),
            result=result,
            warn=lambda text: _say(f"warning: {text}"),
        )
    text_file = sys.stderr if exports.stdout else sys.stdout
    if gates:
        print(gate_report.render_gates(gates, **_shape_of(text_file)), file=text_file, flush=True)
    print(ci.annotate(gates, refusals), end="", file=text_file, flush=True)
    if exports.stdout:
        print(gate_report.FORMATS[exports.stdout](gates, refusals), end="", flush=True)
    errors = [*(refusal.error for refusal in refusals), *ci.publish(gates, refusals, exports=exports)]
    for error in errors:
        if debug:
            raise error
        _say(f"error: {error}")
    raise typer.Exit(gate.exit_code(gates, errors, no_fail=no_fail))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="A file of run --export-json.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown.")] = False,
    debug: Tracebacks = False,
) -> None:
    """Show two results side by side."""
    from pegprof.profiling import gate, side_by_side

    results = gate.read_result(before), gate.read_result(after)
    if markdown:
        print(side_by_side.render_markdown(*results), end="")
    else:
        print(side_by_side.render_terminal(*results, **_shape_of(sys.stdout)))


def _show(result: Result, render: Callable[..., str], exports: "Exports", *, quiet: bool) -> None:
    """The table on stdout, or what is exported there; the table is then on stderr, for those who want to see it."""
    from pegprof.profiling.report import FORMATS

    table_file = sys.stderr if exports.stdout else sys.stdout
    if not (exports.stdout and quiet):
        print(render(**_shape_of(table_file)), file=table_file, flush=True)
    if exports.stdout:
        print(FORMATS[exports.stdout](result), end="", flush=True)


def _shape_of(file: IO[str], *, widest: int = 100) -> dict[str, Any]:
    """How text should look in a stream: as wide as a terminal is, up to a point, and in colour if it wants that."""
    from rich.console import Console

    from pegprof.profiling.tables import WIDTH

    console = Console(file=file)
    width = min(console.width, widest) if file.isatty() else WIDTH
    return {"width": width, "color": console.is_terminal and not console.no_color}


@app.command()
def experiment(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which one; a wrong name lists them all.")],
    quick: Annotated[bool, typer.Option("--quick", help="A look, in under five minutes.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it goes; reports/NAME, or reports/NAME-quick.")
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Repeat one of the paper's experiments.

    Writes tables, figures and a page that says what agrees. What was interrupted goes on where it stopped.
    """
    from pegprof.experiments import load_experiment
    from pegprof.experiments.runner import run_experiment
    from pegprof.profiling import output, progress

    chosen = load_experiment(name)
    folder = out or Path("reports") / (f"{name}-quick" if quick else name)
    output.make_folder(folder, "--out")
    with progress.listen(quiet=quiet) as talk:
        outcome = run_experiment(chosen, folder, quick=quick, talk=talk)
    for finding in outcome.findings:
        print(f"{finding.verdict}: {finding.claim}\n    {finding.measured}")
    _say(f"{outcome.done} of {outcome.planned} runs; wrote {outcome.page}")
    outcome.require_all()
