"""Do activations dominate parameters, for every model of the zoo? Compiled only: nothing is run, however large it is.

Each model is described, compiled and judged by fresh processes, as ``pegprof run MODEL --no-time`` would. The files are
rewritten after each model, so that what is known is on disk when one stops waiting.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import pegprof
from benchmarks.command import run_command, say, write_csv
from pegprof.cli import arguments
from pegprof.errors import PegprofError
from pegprof.models.problem import zoo_names
from pegprof.report.markdown import table
from pegprof.report.tables import Column
from pegprof.result.result import Result
from pegprof.units import UNKNOWN, format_bytes, format_count, format_ratio

METHODS = ("grad", "vmap", "surgery")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """One model: the verdict, its witnesses, and what the methods take. The fields are the columns of the CSV."""

    model: str
    parameters: int | None = None
    dtype: str | None = None
    target: str | None = None
    parameter_bytes: int | None = None
    activation_bytes_per_example: int | None = None
    dominates: str | None = None
    traced_bytes_per_example: int | None = None
    by_the_trace: str | None = None
    share_with_t_at_least_d: float | None = None
    by_the_rule: str | None = None
    batch: int | None = None
    grad_peak_bytes: int | None = None
    vmap_peak_ratio: float | None = None
    surgery_peak_ratio: float | None = None
    surgery_microbatch_size: int | None = None
    reason: str = ""  # why something is not known
    jax: str | None = None


def main(
    models: Annotated[str | None, typer.Option(metavar="NAME[,NAME]...", help="Which models; all of the zoo.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="At which the methods are compared.")] = 64,
    csv: Annotated[Path, typer.Option(help="Where the rows go.")] = Path("reports/zoo-verdicts.csv"),
    markdown: Annotated[Path, typer.Option(help="Where the table goes.")] = Path("reports/zoo-verdicts.md"),
) -> None:
    """Write the verdict on every model of the zoo, as CSV and as a table in Markdown."""
    judged = []
    for model in arguments.parse_names(models) if models else zoo_names():
        say(f"{model} ...")
        judged.append(judge(model, batch))
        say(f"{model}: {judged[-1].dominates or judged[-1].reason}")
        write_csv([dataclasses.asdict(each) for each in judged], str(csv))
        markdown.write_text(render(judged, batch), encoding="utf-8")


def judge(model: str, batch: int) -> Judged:
    """The verdict on a model, or the reason why there is none."""
    try:
        result = pegprof.profile(model, batch=batch, methods=METHODS, time=False)
    except PegprofError as error:
        return Judged(model=model, reason=error.what)
    return summarise(result)


def summarise(result: Result) -> Judged:
    """What of a result is in the table."""
    verdict = result.verdict
    grad, vmap, surgery = result.rows
    failures = [f"{row.method}: {row.reason}" for row in result.rows if row.status == "failed"]
    compiled = Judged(
        model=grad.model,
        parameters=grad.parameters,
        dtype=grad.dtype,
        target=grad.target,
        parameter_bytes=grad.parameter_bytes,
        batch=grad.batch,
        grad_peak_bytes=grad.peak_bytes,
        vmap_peak_ratio=vmap.peak_ratio,
        surgery_peak_ratio=surgery.peak_ratio,
        surgery_microbatch_size=surgery.microbatch_size,
        reason="; ".join(failures),
        jax=grad.jax,
    )
    if verdict is None:
        return dataclasses.replace(compiled, reason="; ".join(["no verdict", *failures]))
    return dataclasses.replace(
        compiled,
        activation_bytes_per_example=verdict.activation_bytes_per_example,
        dominates=_who(verdict.activations_dominate),
        traced_bytes_per_example=verdict.traced_bytes_per_example,
        by_the_trace=_who(verdict.trace_says),
        share_with_t_at_least_d=verdict.rule_share,
        by_the_rule=_who(verdict.rule_says),
    )


def _who(activations_dominate: bool | None) -> str | None:
    return {None: None, True: "activations", False: "parameters"}[activations_dominate]


def _share(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


_TABLE = (
    Column(header="model", cell=lambda judged: judged.model, right=False),
    Column(header="parameters", cell=lambda judged: format_count(judged.parameters)),
    Column(header="their bytes", cell=lambda judged: format_bytes(judged.parameter_bytes)),
    Column(header="activations of an example", cell=lambda judged: format_bytes(judged.activation_bytes_per_example)),
    Column(header="what dominates", cell=lambda judged: judged.dominates or UNKNOWN, right=False),
    Column(header="by the trace", cell=lambda judged: judged.by_the_trace or UNKNOWN, right=False),
    Column(header="T ≥ D for", cell=lambda judged: _share(judged.share_with_t_at_least_d)),
    Column(header="memory of vmap", cell=lambda judged: f"{format_ratio(judged.vmap_peak_ratio)} × grad"),
    Column(header="of surgery", cell=lambda judged: f"{format_ratio(judged.surgery_peak_ratio)} × grad"),
    Column(header="at a time", cell=lambda judged: str(judged.surgery_microbatch_size or UNKNOWN)),
)


def render(judged: Sequence[Judged], batch: int) -> str:
    """The table, and why a row has holes."""
    lines = [
        "# What dominates, activations or parameters",
        "",
        f"By `python benchmarks/zoo_verdicts.py --batch {batch}`. Activations of one example: the slope of the plain",
        "gradient's temporaries, by XLA. T ≥ D, the paper's rule: for which part of the parameters in matrices.",
        f"The methods are compared at batch {batch}; surgery takes as many examples at a time as its planner finds",
        "best in the memory that was free. Nothing was run.",
        "",
        *table(_TABLE, judged),
        "",
        *(f"- {each.model}: {each.reason}" for each in judged if each.reason),
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    run_command(main)
