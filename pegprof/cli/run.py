"""``pegprof run``: measure what each method costs on a model."""

import contextlib
import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from pegprof.cli.help import HOW_LONG, OUTPUT, WHAT
from pegprof.cli.options import (
    ALL_METHODS,
    Debug,
    Dtype,
    MemoryLimit,
    Mesh,
    Methods,
    MicrobatchSize,
    Model,
    NoCache,
    NoCsv,
    NoKernels,
    Quiet,
    Seed,
    SeqLen,
    Set,
    Stats,
    Step,
    Targets,
    TimeLimit,
    export,
)
from pegprof.cli.printing import say, shape_of, show
from pegprof.errors import ExitCode
from pegprof.result.result import Result
from pegprof.result.settings import DEFAULT_BATCH
from pegprof.units import format_seconds, spell_duration


def run(
    model: Model,
    batch: Annotated[
        str, typer.Option(metavar="N[,N]...", help="Batch sizes, each measured in turn.", rich_help_panel=WHAT)
    ] = str(DEFAULT_BATCH),
    option: Set = None,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    methods: Methods = ALL_METHODS,
    stats: Stats = None,
    step: Step = None,
    microbatch_size: MicrobatchSize = 1,
    seed: Seed = 0,
    target: Targets = None,
    mesh: Mesh = None,
    memory_limit: MemoryLimit = None,
    no_cache: NoCache = False,
    no_kernels: NoKernels = False,
    no_time: Annotated[
        bool,
        typer.Option(
            "--no-time/--time", help="Compile only: memory and verdict, without times.", rich_help_panel=HOW_LONG
        ),
    ] = False,
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check/--check",
            help="Compare no statistics between methods, and do not check that examples are independent.",
            rich_help_panel=HOW_LONG,
        ),
    ] = False,
    warmup: Annotated[
        int,
        typer.Option(
            "--warmup", "-w", min=0, metavar="N", help="Runs of each method before timing.", rich_help_panel=HOW_LONG
        ),
    ] = 1,
    runs: Annotated[
        int | None,
        typer.Option(
            "--runs",
            "-r",
            min=1,
            metavar="N",
            help="Timed runs of each method. [default: 3 to 50, by how long they take]",
            rich_help_panel=HOW_LONG,
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Fresh processes to time each method in; 8 for a baseline of gate --time.",
            rich_help_panel=HOW_LONG,
        ),
    ] = 1,
    time_limit: TimeLimit = "585s",
    export_csv: Annotated[str | None, export("the rows as CSV")] = None,
    no_csv: NoCsv = False,
    export_json: Annotated[str | None, export("everything as JSON, every sample and the plan included,")] = None,
    export_markdown: Annotated[str | None, export("a report for a pull request as Markdown")] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append every event to FILE as it happens. If FILE exists, the run goes on from it.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure what per-example gradient statistics cost on a model.

    Compares the time and memory of each method with the plain gradient's, and says whether activations or parameters
    dominate. The table goes to stdout, or to stderr when an export does; the rows also go to
    reports/MODEL-bBATCH-TARGET.csv, unless --export-csv or --no-csv says otherwise. Compiling is finished even if it
    takes longer than the time limit. Project-wide defaults can stand in pyproject.toml, under [tool.pegprof.run].
    """
    from pegprof.cli import arguments
    from pegprof.measure import progress, session
    from pegprof.models.problem import check_spec
    from pegprof.report import output, terminal
    from pegprof.result.settings import Settings

    check_spec(model)
    settings = Settings(
        model=model,
        options=arguments.parse_options(option or (), seq_len=seq_len, dtype=dtype),
        batches=arguments.parse_batches(batch),
        methods=arguments.parse_methods(methods),
        stats=arguments.parse_stats(stats, step),
        step=step,
        microbatch_size=microbatch_size,
        time=not no_time,
        warmup=warmup,
        runs=runs,
        processes=processes,
        time_limit_s=arguments.parse_time_limit(time_limit),
        memory_limit_bytes=arguments.parse_memory_limit(memory_limit),
        check=not no_check,
        seed=seed,
        targets=arguments.parse_targets(target),
        cache=not no_cache,
        kernels=not no_kernels,
        mesh=arguments.parse_mesh(mesh),
    )
    with progress.listen(quiet=quiet) as talk:
        chosen = session.find_targets(settings, talk=talk)
    exports = output.choose_exports(
        {"csv": export_csv, "json": export_json, "markdown": export_markdown},
        no_csv=no_csv,
        default_csv=output.default_csv_path(settings, [each.name for each in chosen]),
    )
    exports.check_writable()
    saver = output.Saver(exports)
    listening = progress.listen(quiet=quiet, command=("run", settings))
    with listening as talk, contextlib.suppress(KeyboardInterrupt):
        session.measure(
            settings,
            chosen=chosen,
            talk=talk,
            save=saver,
            preview=lambda result: talk(terminal.render_preview(result, **shape_of(sys.stderr))),
            debug=debug,
            log_path=log,
        )
    result = saver.latest
    if result is None:  # interrupted before there was anything
        raise typer.Exit(ExitCode.INTERRUPTED)
    show(result, lambda **shape: terminal.render_terminal(result, **shape), exports, quiet=quiet)
    if saver.failure:
        raise saver.failure
    for path in () if quiet else exports.files.values():
        say(f"wrote {path}")
    if result.complete and result.exit_code == ExitCode.TIME_LIMIT:
        say(_explain_time_limit(result))
    raise typer.Exit(result.exit_code if result.complete else ExitCode.INTERRUPTED)


def _explain_time_limit(result: Result) -> str:
    """What used the time up, and a limit that should do."""
    limit_s = result.settings.time_limit_s
    compile_s = sum(row.compile_s or 0.0 for row in result.rows)
    longer = spell_duration(60 * math.ceil((2 * limit_s + 2 * compile_s) / 60))
    what = f"error: the time limit of {spell_duration(limit_s)} left too little time to measure"
    why = f": compiling alone took {format_seconds(compile_s)}" if compile_s > limit_s / 4 else ""
    return f"{what}{why}\nhint: try --time-limit {longer}, or --no-time for memory and verdict alone"
