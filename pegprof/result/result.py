"""Result: the one record that every report reads. It knows nothing of how it was measured or how it is shown."""

import dataclasses
import html
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pegprof.engine.plan import Plan
from pegprof.errors import ExitCode, PegprofError
from pegprof.result import records
from pegprof.result.environment import Environment
from pegprof.result.remarks import Remark
from pegprof.result.samples import Sample, from_times
from pegprof.result.settings import Settings
from pegprof.result.verdict import Verdict
from pegprof.targets.hlo.collectives import Collective

if TYPE_CHECKING:
    import pandas

SCHEMA = 3
"""Of the JSON. It grows by one whenever a field gets another meaning or goes away."""
OLDEST_SCHEMA = 2
"""That is read too: there times were ``samples_s``, without processes and rounds."""
GATE_KIND = "gate"
"""Of JSON that is the outcome of a gate; a Result has no kind."""

Status = Literal["ok", "refused", "failed", "skipped"]
Evidence = Literal["measured", "compiled"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One method at one batch size on one target. Its fields are the columns of the CSV, in order; None is unknown.

    ``peak_bytes`` is what XLA assigns for arguments, results and temporaries; ``time_s`` is the median of ``runs``
    rounds at ``time_batch`` examples, in ``processes`` processes one after the other; ratios are to ``grad`` of the
    same batch and target, and that of times is of the same rounds; ``compile_s`` includes tracing and lowering. Of a
    row that a compiler refused, ``peak_bytes`` is what it said it would need, and there are no ratios.
    ``host_peak_bytes`` and ``device_peak_bytes`` are measured at ``measured_batch`` examples, arguments included; XLA's
    figure for that same program is ``measured_batch_peak_bytes``. ``compiler`` is what compiled for a device that is
    not here, with its version. ``step`` is the optimizer whose whole step was measured, if one was, and
    ``optimizer_state_bytes`` what that keeps from step to step, the same in all rows: it is among the arguments.

    On a mesh, bytes and flops are those of one of its ``devices``. It sends ``collective_bytes`` to others, of which
    ``loop_collective_bytes`` inside of loops, in ``collective_floor_s`` at least, by its links' published bandwidth.
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
    device_peak_bytes: int | None = None
    measured_batch: int | None = None
    measured_batch_peak_bytes: int | None = None
    compiler: str | None = None
    step: str | None = None
    optimizer_state_bytes: int | None = None
    mesh: str | None = None
    devices: int | None = None
    collective_bytes: int | None = None
    loop_collective_bytes: int | None = None
    collective_floor_s: float | None = None
    processes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one method at one batch size on one target sends from device to device, the largest first."""

    batch: int
    method: str
    target: str
    collectives: tuple[Collective, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowRemarks:
    """What there is to say of one row; its ``reason`` is made of that."""

    batch: int
    method: str
    target: str
    remarks: tuple[Remark, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What was found. ``print`` it for the table; ``to_json`` keeps all of it.

    Args:
      settings: what was asked for.
      rows: one for each batch, method and target.
      verdict: activations against parameters on the first target; None where they could not be compiled.
      samples: every round's time, by (batch, method).
      plans: what surgery does, by batch, on the first target.
      environment: versions, device and settings of JAX: what makes two results comparable.
      options: the model's options in effect, the defaults too.
      complete: False while there is still something to measure, so that the file of a run that was stopped says so.
      other_verdicts: those on the other targets.
      other_plans: what surgery does there, by target and batch.
      traffic: the collectives of each row that is of a mesh.
      remarks: on each row that there is something to say of.
    """

    settings: Settings
    rows: tuple[Row, ...]
    verdict: Verdict | None = None
    samples: Mapping[tuple[int, str], tuple[Sample, ...]] = dataclasses.field(default_factory=dict)
    plans: Mapping[int, Plan] = dataclasses.field(default_factory=dict)
    environment: Environment | None = None
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    complete: bool = True
    other_verdicts: tuple[Verdict, ...] = ()
    other_plans: Mapping[str, Mapping[int, Plan]] = dataclasses.field(default_factory=dict)
    traffic: tuple[Traffic, ...] = ()
    remarks: tuple[RowRemarks, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """A method that does not fit is an answer, and so is one that was too slow beside others that were timed.

        One that crashed or disagrees is none; and if the time limit came before anything was timed, that is said.
        """
        statuses = {row.status for row in self.rows}
        if not statuses or "failed" in statuses:
            return ExitCode.UNMEASURED
        timed = [row.runs or 0 for row in self.rows if row.status == "skipped" or row.time_s is not None]
        if timed and max(timed) < min(self.settings.runs or 2, 2):  # one run, not warmed up, is no measurement
            return ExitCode.TIME_LIMIT
        return ExitCode.OK

    @property
    def samples_s(self) -> dict[tuple[int, str], tuple[float, ...]]:
        """The times alone, by (batch, method)."""
        return {key: tuple(sample.time_s for sample in samples) for key, samples in self.samples.items()}

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(row.batch for row in self.rows))

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.target for row in self.rows))

    @property
    def groups(self) -> list[list[Row]]:
        """The rows that are compared with each other: those of one batch and target, batch by batch."""
        groups = ([row for row in self.rows if (row.batch, row.target) == key] for key in self._keys())
        return [group for group in groups if group]

    def _keys(self) -> Iterator[tuple[int, str]]:
        return itertools.product(self.batches, self.targets)

    def remarks_on(self, row: Row) -> tuple[Remark, ...]:
        """What there is to say of a row. An older file has a text alone, with semicolons between remarks."""
        for each in self.remarks:
            if (each.batch, each.method, each.target) == (row.batch, row.method, row.target):
                return each.remarks
        return tuple(Remark(kind="other", words=words) for words in row.reason.split("; ") if words)

    def verdict_on(self, target: str) -> Verdict | None:
        """Activations against parameters on a target."""
        return next((v for v in (self.verdict, *self.other_verdicts) if v and v.target == target), None)

    def plans_on(self, target: str) -> Mapping[int, Plan]:
        """What surgery does on a target, by batch."""
        return self.plans if target == next(iter(self.targets), None) else self.other_plans.get(target, {})

    def to_frame(self) -> "pandas.DataFrame":
        """The rows as a table of pandas, the columns named and ordered as in the CSV."""
        import pandas

        columns = [field.name for field in dataclasses.fields(Row)]
        return pandas.DataFrame([dataclasses.asdict(row) for row in self.rows], columns=columns)

    def to_json(self) -> str:
        """All of it, every sample included; ``from_json`` reads it back."""
        by_batch: dict[int, dict[str, tuple[Sample, ...]]] = {}
        for (batch, method), samples in self.samples.items():
            by_batch.setdefault(batch, {})[method] = samples
        data = records.encode({**_fields(self), "samples": by_batch})
        return json.dumps({"schema": SCHEMA, **data}, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Result":
        """A Result that ``to_json`` wrote, by this version of pegprof or an older one.

        Raises:
          PegprofError: the text is not JSON, not a result, or of a newer version.
        """
        data, schema = _load(text)
        try:
            by_batch = _read_samples(data, schema)
            samples = {(b, method): found for b, of_batch in by_batch.items() for method, found in of_batch.items()}
            result: Result = records.decode(cls, data)
        except records.Unreadable as error:
            raise _not_a_result(str(error)) from error
        if len({(row.batch, row.method, row.target) for row in result.rows}) < len(result.rows):
            raise _not_a_result("two rows are of the same batch, method and target")
        return dataclasses.replace(result, samples=samples)

    def __str__(self) -> str:
        from pegprof.report.terminal import render_terminal

        return render_terminal(self)

    def _repr_html_(self) -> str:
        """What a notebook shows of a result that is the last line of a cell: the same text."""
        return f'<pre style="white-space: pre">{html.escape(str(self), quote=False)}</pre>'


_SAMPLES = Mapping[int, Mapping[str, tuple[Sample, ...]]]
_TIMES = Mapping[int, Mapping[str, tuple[float, ...]]]  # of schema 2


def _read_samples(data: dict[str, Any], schema: int) -> Mapping[int, Mapping[str, tuple[Sample, ...]]]:
    """By batch and method; they are taken out of the data, which has its keys as text."""
    if schema == SCHEMA:
        found: Mapping[int, Mapping[str, tuple[Sample, ...]]] = records.decode(
            _SAMPLES, data.pop("samples", {}), "samples"
        )
        return found
    times_s: Mapping[int, Mapping[str, tuple[float, ...]]] = records.decode(
        _TIMES, data.pop("samples_s", {}), "samples_s"
    )
    return {batch: from_times(by_method) for batch, by_method in times_s.items()}


def _fields(record: Result) -> dict[str, Any]:
    """The fields of a record as they are; ``asdict`` would copy all that they hold."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _load(text: str) -> tuple[dict[str, Any], int]:
    """The object that JSON holds, and its schema, which is one that can be read."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_a_result(str(error) or "it is nested too deeply") from error
    if isinstance(data, dict) and data.get("kind") == GATE_KIND:
        raise _not_a_result("it is the outcome of a gate")
    schema = data.pop("schema", None) if isinstance(data, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise _not_a_result("it has no schema")
    if not OLDEST_SCHEMA <= schema <= SCHEMA:
        what = f"the result has schema {schema}, and this version of pegprof reads {OLDEST_SCHEMA} and {SCHEMA}"
        newer = schema > SCHEMA
        hint = (
            "a newer pegprof wrote it: upgrade, or measure again"
            if newer
            else "an older pegprof wrote it: measure again"
        )
        raise PegprofError(what, hint=hint)
    return data, schema


def _not_a_result(why: str) -> PegprofError:
    return PegprofError(
        f"this is not a result of pegprof: {why}", hint="pegprof run writes one with --export-json FILE"
    )
