"""Arguments and options that several commands take."""

from typing import Annotated

import typer

from pegprof.cli import completion
from pegprof.cli.help import HOW_LONG, OUTPUT, WHAT, WHERE
from pegprof.result.settings import FORMULAS, METHODS, STATS
from pegprof.result.steps import STEPS

ALL_METHODS = ",".join(METHODS)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name (pegprof list), file.py:name (pegprof new) or package.module:name.",
        autocompletion=completion.complete_models,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a model option, like width=64; repeat it for several. pegprof inspect MODEL lists them.",
        rich_help_panel=WHAT,
        autocompletion=completion.complete_options,
    ),
]
SeqLen = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Short for --set seq_len=N.", rich_help_panel=WHAT)
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|bfloat16",
        help="Short for --set dtype=...",
        rich_help_panel=WHAT,
        autocompletion=completion.complete_dtypes,
    ),
]
Methods = Annotated[
    str,
    typer.Option(
        metavar="NAME[,NAME]...",
        help=f"Methods to compare: {', '.join(METHODS)}.",
        show_default="all",
        rich_help_panel=WHAT,
        autocompletion=completion.complete_methods,
    ),
]
MicrobatchSize = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Examples at a time for the method microbatch.", rich_help_panel=WHAT),
]
Stats = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[,NAME]...",
        help=f"Statistics to compute: {', '.join(FORMULAS)}. [default: {','.join(STATS)}]",
        rich_help_panel=WHAT,
        autocompletion=completion.complete_stats,
    ),
]
Step = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Measure whole training steps of an optimizer, its state included: {', '.join(STEPS)}.",
        rich_help_panel=WHAT,
        autocompletion=completion.complete_steps,
    ),
]
Seed = Annotated[
    int, typer.Option(metavar="N", help="Random seed for parameters and data, an integer.", rich_help_panel=WHAT)
]
Targets = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME[,NAME]...",
        help="Compile for these devices; pegprof targets lists them. [default: this machine]",
        rich_help_panel=WHERE,
        autocompletion=completion.complete_targets,
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="AXIS=N[,AXIS=N]...",
        help="Mesh of a slice such as --target tpu-v5p:4x4x4: data=16,fsdp=4. [default: all along data]",
        rich_help_panel=WHERE,
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Refuse what needs more: 20G or 20GiB (2^30 bytes each), 20GB (10^9). [default: all that is free]",
        rich_help_panel=WHERE,
    ),
]
AnyMesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXIS=N[,AXIS=N]...|auto",
        help="Mesh of a slice, such as data=16,fsdp=4; auto tries the sensible ones. [default: all along data]",
        rich_help_panel=WHERE,
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache/--cache",
        help="Compile again, also what the cache knows (pegprof cache info).",
        rich_help_panel=WHERE,
    ),
]
NoKernels = Annotated[
    bool,
    typer.Option("--no-kernels/--kernels", help="Use no fused kernels on TPUs and NVIDIA GPUs.", rich_help_panel=WHERE),
]
TimeLimit = Annotated[
    str,
    typer.Option(
        metavar="DURATION", help="Time for everything: 90s, 10m, 1h; a bare 90 is seconds.", rich_help_panel=HOW_LONG
    ),
]
NoCsv = Annotated[bool, typer.Option("--no-csv/--csv", help="Write no CSV.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only, no progress.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks, and what the model prints.")]
Tracebacks = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def export(what: str) -> typer.models.OptionInfo:
    """The option ``--export-FORMAT FILE`` of a command."""
    option: typer.models.OptionInfo = typer.Option(
        metavar="FILE", help=f"Write {what} to FILE; - is stdout.", rich_help_panel=OUTPUT
    )
    return option
