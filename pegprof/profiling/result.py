"""Result: the one record that every report reads. It knows nothing of how it was measured or how it is shown."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pegprof.errors import ExitCode
from pegprof.profiling.verdict import Verdict

if TYPE_CHECKING:
    import pandas

METHODS = ("grad", "vmap", "microbatch", "surgery")
STATS = ("mean", "second_moment")
MIN_RUNS = 3

Status = Literal["ok", "refused", "failed", "skipped"]
Evidence = Literal["measured", "compiled"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for.

    Args:
      model: a zoo name, ``package.module:name`` or ``file.py:name``.
      options: the model's options by name, as ``load_problem`` takes them.
      batches: the batch sizes to measure.
      methods: which methods, in the order of the report.
      stats: which statistics, by name.
      microbatch_size: how many examples the method ``microbatch`` takes at a time.
      time: whether to run anything; without it the report stands on compiles alone.
      warmup: runs of each method that do not count.
      runs: runs of each method that count; None takes as many as are worth their time.
      time_limit_s: for all timing; the batch that is timed is halved until it fits.
      memory_limit_bytes: refuse what needs more; None takes what is free.
      seed: of the parameters and the data.
    """

    model: str
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    batches: tuple[int, ...] = (64,)
    methods: tuple[str, ...] = METHODS
    stats: tuple[str, ...] = STATS
    microbatch_size: int = 1
    time: bool = True
    warmup: int = 1
    runs: int | None = None
    time_limit_s: float = 300.0
    memory_limit_bytes: int | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One method at one batch size on one target. Its fields are the columns of the CSV, in order; None is unknown.

    ``peak_bytes`` is what XLA assigns for arguments, results and temporaries; ``time_s`` is the median of ``runs`` runs
    at ``time_batch`` examples; ratios are to ``grad`` of the same batch; ``compile_s`` includes tracing and lowering.
    """

    model: str
    parameters: int | None = None
    batch: int
    seq_len: int | None = None
    dtype: str | None = None
    stats: str
    method: str
    microbatch_size: int | None = None
    target: str
    device: str | None = None
    evidence: Evidence
    status: Status
    reason: str = ""
    time_s: float | None = None
    time_iqr_s: float | None = None
    time_batch: int | None = None
    runs: int | None = None
    time_ratio: float | None = None
    compile_s: float | None = None
    peak_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None
    host_peak_bytes: int | None = None
    peak_ratio: float | None = None
    capacity_bytes: int | None = None
    flops: int | None = None
    activation_bytes_per_example: int | None = None
    parameter_bytes: int | None = None
    activations_dominate: bool | None = None
    max_rel_error: float | None = None
    materialised_parameters: int | None = None
    seed: int | None = None
    pegprof: str | None = None
    jax: str | None = None
    jaxlib: str | None = None
    xla_flags: str | None = None
    timestamp: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What was found.

    Args:
      settings: what was asked for.
      rows: one for each batch and method.
      verdict: activations against parameters; None where they could not be compiled.
      samples_s: every single time measured, by (batch, method).
    """

    settings: Settings
    rows: tuple[Row, ...]
    verdict: Verdict | None = None
    samples_s: Mapping[tuple[int, str], tuple[float, ...]] = dataclasses.field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """A method that does not fit is an answer; one that crashed or disagrees is not."""
        answered = bool(self.rows) and all(row.status in ("ok", "refused") for row in self.rows)
        return ExitCode.OK if answered else ExitCode.UNMEASURED

    def to_frame(self) -> "pandas.DataFrame":
        """The rows as a table of pandas, the columns named and ordered as in the CSV."""
        import pandas

        columns = [field.name for field in dataclasses.fields(Row)]
        return pandas.DataFrame([dataclasses.asdict(row) for row in self.rows], columns=columns)
