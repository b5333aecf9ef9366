"""The command line: parse, call, print. Whatever is heavy to import is imported inside the command that needs it.

Data goes to stdout, talk to stderr.
"""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import pegprof
from pegprof.errors import ExitCode, PegprofError

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
    """The entry point: errors that a user can act on become words and an exit code."""
    try:
        app(prog_name="pegprof")
    except PegprofError as error:
        if "--debug" in sys.argv:
            raise
        _say(f"error: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    sys.exit(ExitCode.OK)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    pass


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


@app.command()
def run(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A zoo name (see list), package.module:name or file.py:name.")
    ],
    batch: Annotated[str, typer.Option(metavar="N[,N]...", help="Batch sizes.")] = "64",
    option: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the model.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="The same as --set seq_len=N.")] = None,
    methods: Annotated[str, typer.Option(help="Which methods.")] = "grad,vmap,microbatch,surgery",
    stats: Annotated[str, typer.Option(help="Which statistics.")] = "mean,second_moment",
    microbatch_size: Annotated[int, typer.Option(min=1, help="Examples at a time in the method microbatch.")] = 1,
    warmup: Annotated[int, typer.Option(min=0, help="Runs that do not count.")] = 1,
    runs: Annotated[int | None, typer.Option(min=1, help="Runs that count; 3 to 50 if not given.")] = None,
    time_limit: Annotated[float, typer.Option(metavar="S", min=1, help="Seconds for all timing.")] = 300,
    memory_limit: Annotated[str | None, typer.Option(metavar="20GiB", help="Refuse what needs more.")] = None,
    no_time: Annotated[bool, typer.Option("--no-time", help="Compile only: memory and verdict.")] = False,
    seed: Annotated[int, typer.Option(help="Of parameters and data.")] = 0,
    export_csv: Annotated[str | None, typer.Option(metavar="FILE", help="Where the CSV goes; - is stdout.")] = None,
    no_csv: Annotated[bool, typer.Option("--no-csv", help="Write no CSV.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, and all that the model prints.")] = False,
) -> None:
    """Measure what each method costs on a model.

    Time, memory and whether activations dominate parameters, as a table and as a CSV. The CSV goes to
    reports/MODEL-bBATCH-TARGET.csv unless --export-csv or --no-csv says otherwise.
    """
    from pegprof.profiling import arguments, measure, output, report, targets, units
    from pegprof.profiling.result import Result, Settings

    settings = Settings(
        model=model,
        options=arguments.parse_options(option or (), seq_len),
        batches=arguments.parse_batches(batch),
        methods=arguments.parse_names(methods),
        stats=arguments.parse_names(stats),
        microbatch_size=microbatch_size,
        time=not no_time,
        warmup=warmup,
        runs=runs,
        time_limit_s=time_limit,
        memory_limit_bytes=units.parse_bytes(memory_limit) if memory_limit else None,
        seed=seed,
    )
    csv_to_stdout = export_csv == "-" and not no_csv
    csv_path = None
    if not (no_csv or csv_to_stdout):
        csv_path = Path(export_csv) if export_csv else output.default_csv_path(settings, targets.host_target().name)
        output.check_writable(csv_path)

    def save(result: Result) -> None:
        if csv_path:
            output.write(csv_path, report.FORMATS["csv"](result))

    result = measure.measure(settings, talk=_say_nothing if quiet else _say, save=save, debug=debug)
    table_file = sys.stderr if csv_to_stdout else sys.stdout
    print(report.render_terminal(result, color=_wants_color(table_file)), file=table_file)
    if csv_to_stdout:
        print(report.FORMATS["csv"](result), end="")
    if csv_path:
        _say(f"wrote {csv_path}")
    raise typer.Exit(result.exit_code)


@app.command(name="list")
def list_models() -> None:
    """List the models of the zoo."""
    from pegprof.problem import load_problem, zoo_names

    names = zoo_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}  {load_problem(name).description}")


def _wants_color(file: object) -> bool:
    from rich.console import Console

    console = Console(file=file)  # type: ignore[arg-type]
    return console.is_terminal and not console.no_color
