"""``pegprof fit``: the largest batch that fits on a device."""

from typing import Annotated

import typer

from pegprof.cli.completion import complete_target
from pegprof.cli.help import WHAT, WHERE
from pegprof.cli.options import (
    ALL_METHODS,
    AnyMesh,
    Debug,
    Dtype,
    MemoryLimit,
    Methods,
    MicrobatchSize,
    Model,
    NoCache,
    NoCsv,
    NoKernels,
    Quiet,
    SeqLen,
    Set,
    Stats,
    Step,
    TimeLimit,
    export,
)
from pegprof.cli.printing import say, show
from pegprof.errors import PegprofError
from pegprof.result.settings import DEFAULT_BATCH

MOST_BATCH = 4096
"""Up to which ``fit`` looks, if not told otherwise."""


def fit(
    model: Model,
    batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Say only whether this batch size fits.", rich_help_panel=WHAT),
    ] = None,
    up_to: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help=f"The largest batch size to try. [default: {MOST_BATCH}]", rich_help_panel=WHAT
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The device; pegprof targets lists them. [default: this machine]",
            rich_help_panel=WHERE,
            autocompletion=complete_target,
        ),
    ] = None,
    option: Set = None,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    mesh: AnyMesh = None,
    methods: Methods = ALL_METHODS,
    stats: Stats = None,
    step: Step = None,
    microbatch_size: MicrobatchSize = 1,
    memory_limit: MemoryLimit = None,
    time_limit: TimeLimit = "30m",
    export_csv: Annotated[str | None, export("every compile as CSV")] = None,
    no_csv: NoCsv = False,
    no_cache: NoCache = False,
    no_kernels: NoKernels = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find the largest batch that fits on a device, by compiling for it.

    Nothing is run. With --batch, the exit code answers: 0 if surgery fits (if --methods leaves surgery out, if all
    fit), 1 if not, 3 if a compile failed, 124 if the time limit came before the answer. --mesh auto tries the meshes of
    a slice, and marks those that trade memory against bytes moved best. Every compile is a row of
    reports/MODEL-fit-TARGET.csv, unless --export-csv or --no-csv says otherwise.
    """
    from pegprof.cli import arguments
    from pegprof.measure import fit as fitting
    from pegprof.measure import front, progress, session
    from pegprof.models.problem import check_spec
    from pegprof.report import front_text, output
    from pegprof.result.settings import Settings

    check_spec(model)
    all_meshes = arguments.is_auto(mesh)
    if batch and up_to:
        raise PegprofError("--batch asks about one batch and --up-to about many", hint="leave one of them out")
    most = up_to or MOST_BATCH
    settings = Settings(
        model=model,
        options=arguments.parse_options(option or (), seq_len=seq_len, dtype=dtype),
        batches=(batch or min(DEFAULT_BATCH, most),),
        methods=arguments.parse_methods(methods),
        stats=arguments.parse_stats(stats, step),
        step=step,
        microbatch_size=microbatch_size,
        time=False,
        time_limit_s=arguments.parse_time_limit(time_limit),
        memory_limit_bytes=arguments.parse_memory_limit(memory_limit),
        targets=arguments.parse_one_target(target),
        cache=not no_cache,
        kernels=not no_kernels,
        mesh=arguments.parse_mesh(None if all_meshes else mesh),
    )
    with progress.listen(quiet=quiet, command=("fit", settings, batch, most, all_meshes)) as talk:
        (chosen,) = session.find_targets(settings, talk=talk)
        default_csv = output.fit_csv_path(settings, chosen.name, all_meshes=all_meshes)
        exports = output.choose_exports({"csv": export_csv}, no_csv=no_csv, default_csv=default_csv)
        exports.check_writable()
        saver = output.Saver(exports)
        search = front.find_front if all_meshes else fitting.find_fit
        try:
            found = search(settings, chosen, batch=batch, most=most, talk=talk, save=saver, debug=debug)
        except KeyboardInterrupt:
            for path in exports.files.values() if saver.latest else ():
                talk(f"wrote {path}, with what was compiled until then")
            raise
    show(found.result, lambda **shape: front_text.render(found, **shape), exports, quiet=quiet)
    if saver.failure:
        raise saver.failure
    for path in () if quiet else exports.files.values():
        say(f"wrote {path}")
    raise typer.Exit(found.exit_code)
