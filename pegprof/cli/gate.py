"""``pegprof gate``: fail if a model costs more than its baseline says, or than it did in another revision."""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pegprof.cli.help import COMPARING, HOW_LONG, WHAT
from pegprof.cli.options import (
    Debug,
    Dtype,
    MicrobatchSize,
    Quiet,
    SeqLen,
    Set,
    Stats,
    Step,
    export,
)
from pegprof.cli.printing import say, shape_of
from pegprof.errors import PegprofError
from pegprof.result.settings import DEFAULT_BATCH, METHODS

if TYPE_CHECKING:
    from pegprof.compare.gate import Effort, Gate, Refusal
    from pegprof.compare.limits import LimitTable
    from pegprof.measure.progress import Talk
    from pegprof.result.settings import Settings


def gate_baselines(
    baselines: Annotated[
        list[Path],
        typer.Argument(metavar="BASELINE...", help="Files of run --export-json; with --against also a MODEL."),
    ],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REV", help="Compare with this revision of your code, in the same run.", rich_help_panel=COMPARING
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="By how much bytes and flops may grow. [default: 1%]", rich_help_panel=COMPARING
        ),
    ] = None,
    time: Annotated[
        bool | None,
        typer.Option(
            "--time/--no-time",
            help="Compare times too, as ratios to those of grad. [default: only with --against]",
            rich_help_panel=COMPARING,
        ),
    ] = None,
    max_time_ratio: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="By how much such a ratio may grow. [default: 10%]", rich_help_panel=COMPARING
        ),
    ] = None,
    ceiling: Annotated[
        list[str] | None,
        typer.Option(
            "--max", metavar="METHOD.COLUMN=X", help="The most that a column may be.", rich_help_panel=COMPARING
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option("--runs", "-r", min=1, metavar="N", help="Rounds in each process.", rich_help_panel=HOW_LONG),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Processes to time in, at most. [default: 8, within 2 minutes]",
            rich_help_panel=HOW_LONG,
        ),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Time for each model: 90s, 10m, 1h. [default: the baseline's]",
            rich_help_panel=HOW_LONG,
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(metavar="N[,N]...", help="Batch sizes of MODEL. [default: 64]", rich_help_panel=WHAT),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]...", help="Methods of MODEL, grad among them. [default: all]", rich_help_panel=WHAT
        ),
    ] = None,
    option: Set = None,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    stats: Stats = None,
    step: Step = None,
    microbatch_size: MicrobatchSize = 1,
    result: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare this; run nothing.", rich_help_panel=COMPARING)
    ] = None,
    no_fail: Annotated[
        bool, typer.Option("--no-fail", help="Say what failed, and end with 0 for it.", rich_help_panel=COMPARING)
    ] = False,
    export_junit: Annotated[str | None, export("the outcome as JUnit XML")] = None,
    export_json: Annotated[str | None, export("the outcome as JSON")] = None,
    export_markdown: Annotated[str | None, export("the outcome as Markdown")] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Fail if a model costs more than its baseline says, or than it did in another revision.

    Repeats the runs that the baselines hold and compares bytes, flops and plans, which are the same in every run; times
    only if asked. With --against REV, both revisions run in turns, and a MODEL with the options of run will do for a
    baseline. The exit code is 1 for a regression, 4 for a baseline of other versions or of another device. Limits may
    stand in pyproject.toml, under [tool.pegprof.gate].
    """
    from pegprof.cli import arguments
    from pegprof.compare import gate, limits
    from pegprof.measure import progress, session
    from pegprof.report import ci, gate_report, output
    from pegprof.result.settings import Settings

    if result and len(baselines) > 1:
        raise PegprofError("one result cannot be compared with several baselines", hint="name one baseline")
    if result and against:
        raise PegprofError("--result runs nothing, and --against does", hint="leave one of them out")
    table = limits.read_limits(
        Path.cwd(),
        max_bytes=max_bytes,
        max_time_ratio=max_time_ratio,
        ceilings=ceiling or (),
        time=True if against and time is None else time,
    )
    given = Settings(
        model="",
        options=arguments.parse_options(option or (), seq_len=seq_len, dtype=dtype),
        batches=arguments.parse_batches(batch or str(DEFAULT_BATCH)),
        methods=METHODS if methods is None else arguments.parse_names(methods, "--methods"),
        stats=arguments.parse_stats(stats, step),
        step=step,
        microbatch_size=microbatch_size,
    )
    models = [path for path in baselines if against and path.suffix != ".json"]
    if not models and (given != Settings(model="") or batch):
        hint = "a baseline has its own settings" if not against else "name a MODEL instead of a baseline"
        raise PegprofError("these options need a MODEL", hint=hint)
    exports = output.choose_exports({"junit": export_junit, "json": export_json, "markdown": export_markdown})
    exports.check_apart_from([*(path for path in baselines if path not in models), *([result] if result else [])])
    exports.check_writable()
    effort = gate.Effort(
        runs=runs,
        processes=processes,
        time_limit_s=None if time_limit is None else arguments.parse_time_limit(time_limit),
    )
    command = ("gate", [str(path.resolve()) for path in baselines], against, given, effort)
    with progress.listen(quiet=quiet, command=command) as talk:
        if against:
            wanted = [_settings_for(path, given if path in models else None) for path in baselines]
            gates, refusals = _pass_all_against(against, wanted, table, effort, talk, debug=debug)
        else:
            gates, refusals = gate.pass_gates(
                baselines,
                limits=table,
                measure=lambda settings, check, enough: session.measure(
                    settings, talk=talk, outlined=check, enough=enough, debug=debug
                ),
                result=result,
                effort=effort,
                warn=lambda text: say(f"warning: {text}"),
            )
    text_file = sys.stderr if exports.stdout else sys.stdout
    if gates:
        print(gate_report.render_gates(gates, **shape_of(text_file)), file=text_file, flush=True)
    print(ci.annotate(gates, refusals), end="", file=text_file, flush=True)
    if exports.stdout:
        print(gate_report.FORMATS[exports.stdout](gates, refusals), end="", flush=True)
    errors = [*(refusal.error for refusal in refusals), *ci.publish(gates, refusals, exports=exports)]
    for error in errors:
        if debug:
            raise error
        say(f"error: {error}")
    raise typer.Exit(gate.exit_code(gates, errors, no_fail=no_fail))


def _settings_for(path: Path, given: "Settings | None") -> "Settings":
    """What to measure: a model with the options given, or what a baseline holds."""
    from pegprof.compare import gate

    if given:
        return dataclasses.replace(given, model=str(path))
    return gate.read_result(path).settings


def _pass_all_against(
    revision: str, wanted: "list[Settings]", table: "LimitTable", effort: "Effort", talk: "Talk", *, debug: bool
) -> "tuple[list[Gate], list[Refusal]]":
    """One model after the other; what is wrong with one does not hide what came of the others."""
    from pegprof.compare import gate, limits
    from pegprof.measure import pair, revisions

    for warning in limits.check_limits(table, {each.model: each.methods for each in wanted}, timed=table.time):
        say(f"warning: {warning}")
    gates: list[Gate] = []
    refusals: list[Refusal] = []
    for settings in wanted:
        try:
            with revisions.checked_out(revision, settings.model, folder=Path.cwd()) as older:
                measure = functools.partial(pair.measure_pair, older, talk=talk, debug=debug)
                found = gate.pass_against(settings, revision=older.name, limits=table, effort=effort, measure=measure)
            gates.append(found)
        except PegprofError as error:
            refusals.append(gate.Refusal(baseline=settings.model, error=error))
    return gates, refusals
