"""What was measured on a device, as rows of the CSV and as tables: answers of children in, ``Row`` and text out."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich import box
from rich.table import Table

from benchmarks.on_device_cases import Case
from pegprof.units import UNKNOWN, format_bytes, format_ratio, format_seconds

Status = Literal["ok", "refused", "wrong", "failed"]
"""refused: it does not fit the memory. wrong: it runs, and its values are off."""

Answer = Mapping[str, Any]

OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory", "exceeds available HBM")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The device and the software, the same for all rows of a run.

    Args:
      device_kind: what JAX calls the device.
      chip: its name in the table of chips; empty if it is not there.
      kernels_of: the chip whose kernels are used, and whose peaks are shown.
      evidence: "measured", or that kernels were interpreted, which says nothing of their time.
      runtime: the driver's own version.
    """

    device_kind: str
    chip: str
    kernels_of: str
    evidence: str
    runtime: str
    pegprof: str
    jax: str
    jaxlib: str
    libtpu: str | None
    cuda_plugin: str | None
    matmul_precision: str | None
    xla_flags: str | None
    libtpu_init_args: str | None
    timestamp: str

    @property
    def interprets(self) -> bool:
        return self.evidence != "measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel or one program. What is not known is None, an empty cell.

    Args:
      part: "kernel" or "program".
      name: of the kernel, or of the program.
      shape: B×T×D×E of a kernel, B×V×T of ``rows``.
      reference: what ``ratio`` is to, in the same rounds.
      time_s: the median; ``time_iqr_s`` the range of the middle half.
      calls: for one sample.
      max_rel_error: of the values, beside those of ``compared_with``.
      plain_error: the same of XLA's own product.
      flops: by the kernel's own cost model, and so ``bytes_moved``.
      peak_bytes: of memory; by the device, or as compiled: ``peak_evidence``.
      kernel_sites: at how many sites of the model a kernel is used.
      estimated_s: by the estimator of ``accelerators.py``, from the text of the compiled program.
    """

    part: Literal["kernel", "program"]
    name: str
    model: str = ""
    options: str = ""
    stats: str = ""
    batch: int
    shape: str = ""
    dtype: str
    status: Status = "ok"
    reason: str = ""
    time_s: float | None = None
    time_iqr_s: float | None = None
    runs: int | None = None
    calls: int | None = None
    reference: str = ""
    reference_s: float | None = None
    ratio: float | None = None
    ratio_iqr: float | None = None
    max_rel_error: float | None = None
    compared_with: str = ""
    plain_error: float | None = None
    tile: str = ""
    flops: int | None = None
    bytes_moved: int | None = None
    flops_per_s: float | None = None
    peak_flops_per_s: float | None = None
    bytes_per_s: float | None = None
    peak_bytes_per_s: float | None = None
    peak_bytes: int | None = None
    peak_evidence: str = ""
    peak_ratio: float | None = None
    temp_bytes: int | None = None
    kernel_sites: int | None = None
    microbatch: int | None = None
    compile_s: float | None = None
    estimated_s: float | None = None
    estimated_ratio: float | None = None


COLUMNS = tuple(field.name for record in (Row, Machine) for field in dataclasses.fields(record))


def cells(row: Row, machine: Machine) -> dict[str, Any]:
    return {**dataclasses.asdict(row), **dataclasses.asdict(machine)}


def kernel_row(case: Case, answer: Answer, failure: str = "") -> Row:
    """A kernel alone."""
    time_s = _median(answer.get("times_s"))
    flops, moved = answer.get("flops"), answer.get("bytes_moved")
    return Row(
        part="kernel",
        name=case.kernel,
        batch=case.B,
        shape=case.shape,
        dtype=case.dtype,
        reference=answer.get("reference", ""),
        flops=flops,
        bytes_moved=moved,
        flops_per_s=flops / time_s if flops and time_s else None,
        bytes_per_s=moved / time_s if moved and time_s else None,
        estimated_s=answer.get("estimated_s"),
        **_verdict(answer, failure),
        **_times(answer),
        **_take(answer, "max_rel_error", "plain_error", "tile", "peak_flops_per_s", "peak_bytes_per_s", "compile_s"),
        **_take(answer, "compared_with"),
    )


def program_row(request: Answer, name: str, answer: Answer, failure: str = "") -> Row:
    """A whole program. Memory and estimates, which come later, are added by ``with_memory``."""
    return Row(
        part="program",
        name=name,
        model=request["model"],
        options=" ".join(f"{key}={value}" for key, value in request["options"].items()),
        stats=",".join(request["stats"]),
        batch=request["batch"],
        dtype=request["dtype"],
        reference="grad",
        peak_evidence="compiled" if answer.get("peak_bytes") else "",
        **_verdict(answer, failure),
        **_times(answer),
        **_take(answer, "max_rel_error", "compared_with", "peak_bytes", "temp_bytes", "kernel_sites", "microbatch"),
        **_take(answer, "compile_s"),
    )


def with_memory(row: Row, answer: Answer) -> Row:
    """The device's own peak, where it keeps one, takes the place of the compiled bytes."""
    row = dataclasses.replace(row, estimated_s=answer.get("estimated_s"))
    peak = answer.get("device_peak_bytes")
    return dataclasses.replace(row, peak_bytes=peak, peak_evidence="device") if peak else row


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Memory and estimates of programs beside those of ``grad``, where both are of the same kind."""
    grad = next((row for row in rows if row.name == "grad"), None)
    if grad is None:
        return list(rows)

    def ratio(x: float | None, y: float | None) -> float | None:
        return x / y if x and y else None

    return [
        dataclasses.replace(
            row,
            peak_ratio=ratio(row.peak_bytes, grad.peak_bytes) if row.peak_evidence == grad.peak_evidence else None,
            estimated_ratio=ratio(row.estimated_s, grad.estimated_s),
        )
        for row in rows
    ]


def _verdict(answer: Answer, failure: str) -> dict[str, Any]:
    notes = [answer.get("note"), answer.get("remarks")]
    if failure:
        no_room = any(words in failure for words in OUT_OF_MEMORY)
        return {"status": "refused" if no_room else "failed", "reason": failure}
    if answer.get("wrong"):
        notes.insert(0, f"off by {answer['max_rel_error']:.2g}, more than {answer['tolerance']:.1g}")
    return {"status": "wrong" if answer.get("wrong") else "ok", "reason": "; ".join(filter(None, notes))}


def _times(answer: Answer) -> dict[str, Any]:
    times_s, ratios = answer.get("times_s"), answer.get("ratios")
    return {
        "time_s": _median(times_s),
        "time_iqr_s": _iqr(times_s),
        "runs": len(times_s) if times_s else None,
        "calls": answer.get("calls"),
        "reference_s": _median(answer.get("reference_times_s")),
        "ratio": _median(ratios),
        "ratio_iqr": _iqr(ratios),
    }


def _take(answer: Answer, *names: str) -> dict[str, Any]:
    return {name: answer[name] for name in names if name in answer}


def _median(samples: Sequence[float] | None) -> float | None:
    return statistics.median(samples) if samples else None


def _iqr(samples: Sequence[float] | None) -> float | None:
    """
    >>> _iqr([1.0, 2.0, 3.0, 4.0, 5.0]), _iqr([1.0])
    (2.0, None)
    """
    if not samples or len(samples) < 2:
        return None
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def kernels_table(rows: Sequence[Row], machine: Machine) -> Table:
    """Kernels beside XLA's plain product."""
    left = ("kernel", "shape", "dtype")
    right = ("time", "IQR", "× plain", "error", "of plain", "Tflop/s", "of peak", "GB/s", "of peak", "estimated")
    table = _table(f"Kernels of {machine.kernels_of} on {machine.device_kind}, {machine.evidence}", left, right)
    for row in rows:
        table.add_row(
            row.name,
            row.shape,
            row.dtype,
            format_seconds(row.time_s),
            format_seconds(row.time_iqr_s),
            format_ratio(row.ratio),
            _show(row.max_rel_error, "{:.1e}"),
            _show(row.plain_error, "{:.1e}"),
            _show(row.flops_per_s, "{:.1f}", 1e-12),
            _share(row.flops_per_s, row.peak_flops_per_s),
            _show(row.bytes_per_s, "{:.0f}", 1e-9),
            _share(row.bytes_per_s, row.peak_bytes_per_s),
            format_seconds(row.estimated_s),
            _remark(row),
        )
    return table


def programs_table(rows: Sequence[Row], machine: Machine) -> Table:
    """Programs beside the plain gradient."""
    left = ("program", "dtype")
    right = ("time", "IQR", "× grad", "estimated", "× grad", "error", "memory", "× grad", "kernels")
    first = rows[0]
    title = f"{first.model}, batch {first.batch}, {first.stats} on {machine.device_kind}, {machine.evidence}"
    table = _table(title, left, right)
    for row in rows:
        table.add_row(
            row.name,
            row.dtype,
            format_seconds(row.time_s),
            format_seconds(row.time_iqr_s),
            format_ratio(row.ratio),
            format_seconds(row.estimated_s),
            format_ratio(row.estimated_ratio),
            _show(row.max_rel_error, "{:.1e}"),
            format_bytes(row.peak_bytes) + (" compiled" if row.peak_evidence == "compiled" else ""),
            format_ratio(row.peak_ratio),
            "" if row.kernel_sites is None else str(row.kernel_sites),
            _remark(row),
        )
    return table


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    table.add_column("")
    return table


def _show(number: float | None, form: str, scale: float = 1.0) -> str:
    return UNKNOWN if number is None else form.format(number * scale)


def _share(part: float | None, whole: float | None) -> str:
    return UNKNOWN if part is None or not whole else f"{part / whole:.0%}"


def _remark(row: Row) -> str:
    return row.reason if row.status == "ok" else f"{row.status}: {row.reason}"
