"""``pegprof inspect``: a model and its plan."""

from typing import Annotated

import typer

from pegprof.cli.help import WHAT
from pegprof.cli.options import (
    Debug,
    Dtype,
    MemoryLimit,
    Mesh,
    Model,
    NoKernels,
    Quiet,
    SeqLen,
    Set,
    Stats,
    Targets,
    export,
)
from pegprof.cli.printing import show_text


def inspect(
    model: Model,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Batch size.", rich_help_panel=WHAT)] = 64,
    option: Set = None,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    stats: Stats = None,
    target: Targets = None,
    mesh: Mesh = None,
    memory_limit: MemoryLimit = None,
    no_kernels: NoKernels = False,
    export_json: Annotated[str | None, export("everything as JSON")] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show a model, its options and the plan for its statistics.

    The plan says how surgery gets the statistics of each parameter in the memory that is free. Nothing is run.
    """
    from pegprof.cli import arguments
    from pegprof.measure import inspection, progress
    from pegprof.models.problem import check_spec
    from pegprof.report import output
    from pegprof.report.inspection_text import render_inspection
    from pegprof.result.settings import Settings

    check_spec(model)
    settings = Settings(
        model=model,
        options=arguments.parse_options(option or (), seq_len=seq_len, dtype=dtype),
        batches=(batch,),
        stats=arguments.parse_stats(stats),
        memory_limit_bytes=arguments.parse_memory_limit(memory_limit),
        targets=arguments.parse_targets(target),
        kernels=not no_kernels,
        mesh=arguments.parse_mesh(mesh),
    )
    exports = output.choose_exports({"json": export_json})
    exports.check_writable()
    with progress.listen(quiet=quiet) as talk:
        found = inspection.inspect_model(settings, talk=talk, debug=debug)
    show_text(
        lambda **shape: "\n\n".join(render_inspection(each, **shape) for each in found),
        exports,
        {"json": lambda: inspection.to_json(found) + "\n"},
        quiet=quiet,
        widest=200,
    )
