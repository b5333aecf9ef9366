"""A row of a Result, and what there is to say of it, from all that happened to a method at a batch on a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegprof.result.findings import Compiled, Peak
from pegprof.result.remarks import Remark, join
from pegprof.result.result import Row, Status
from pegprof.result.samples import count_processes, ratio_to_grad
from pegprof.targets import meshes
from pegprof.targets.hlo.collectives import floor_s
from pegprof.units import format_bytes

if TYPE_CHECKING:
    from pegprof.result.events import Place
    from pegprof.result.history import History, Timed

_STATUS_OF_LACK: dict[str, Status] = {"memory": "refused", "time": "skipped"}
UNSTEADY = 0.1  # an interquartile range above this share of the median is worth a remark


def make_row(history: History, batch: int, method: str, place: Place) -> tuple[Row, tuple[Remark, ...]]:
    """The row, and the remarks of which its ``reason`` is made."""
    facts, settings = history.facts, history.settings
    assert facts is not None, "an event says what the model is before any other"
    compiled, grad_compiled = (history.compiled.get((batch, m, place.name), Compiled()) for m in (method, "grad"))
    timed, grad_timed = (history.timed(batch, m if place.runs else "") for m in (method, "grad"))
    capacity_bytes = _capacity(history.capacity_bytes.get(place.name), compiled)
    status, remarks = _judge(history, batch, place, compiled, timed, capacity_bytes)
    verdict = history.verdicts.get(place.name)
    sent = compiled.collectives
    is_sharded = bool(place.mesh) and compiled.assigned_bytes is not None
    row = Row(
        model=facts.model,
        parameters=facts.parameters,
        batch=batch,
        seq_len=facts.seq_len,
        dtype=facts.dtype,
        stats=",".join(settings.stats),
        method=method,
        microbatch_size=compiled.microbatch_size,
        target=place.name,
        device=place.device or facts.device,
        evidence="measured" if timed.samples else "compiled",
        status=status,
        reason=join(remarks),
        time_s=timed.time_s,
        time_iqr_s=timed.iqr_s,
        time_batch=timed.batch,
        runs=len(timed.samples) or None,
        time_ratio=ratio_to_grad(timed.samples, grad_timed.samples if timed.batch == grad_timed.batch else ()),
        compile_s=compiled.compile_s,
        peak_bytes=compiled.peak_bytes,
        argument_bytes=compiled.argument_bytes,
        output_bytes=compiled.output_bytes,
        temp_bytes=compiled.temp_bytes,
        alias_bytes=compiled.alias_bytes,
        host_peak_bytes=timed.peak.host_bytes if timed.peak else None,
        peak_ratio=_ratio(compiled.assigned_bytes, grad_compiled.assigned_bytes),
        capacity_bytes=capacity_bytes,
        flops=compiled.flops,
        activation_bytes_per_example=verdict.activation_bytes_per_example if verdict else None,
        parameter_bytes=facts.parameter_bytes,
        activations_dominate=verdict.activations_dominate if verdict else None,
        max_rel_error=timed.max_rel_error,
        materialised_parameters=compiled.materialised_parameters,
        seed=settings.seed,
        pegprof=history.pegprof,
        jax=facts.jax,
        jaxlib=facts.jaxlib,
        xla_flags=history.xla_flags,
        timestamp=history.timestamp,
        device_peak_bytes=timed.peak.device_bytes if timed.peak else None,
        measured_batch=timed.peak.batch if timed.peak else None,
        measured_batch_peak_bytes=timed.peak.xla_bytes if timed.peak else None,
        compiler=place.compiler,
        step=settings.step,
        optimizer_state_bytes=facts.optimizer_state_bytes,
        mesh=meshes.describe(place.mesh) or None,
        devices=place.devices if place.mesh else None,
        collective_bytes=sum(each.total_bytes for each in sent) if is_sharded else None,
        loop_collective_bytes=sum(each.total_bytes for each in sent if each.loop) if is_sharded else None,
        collective_floor_s=floor_s(sent, place.kind) if is_sharded and place.kind else None,
        processes=count_processes(timed.samples) or None,
    )
    return row, remarks


def _capacity(there: int | None, compiled: Compiled) -> int | None:
    """What there is: a compiler that refuses knows best."""
    return min((bound for bound in (there, compiled.available_bytes) if bound is not None), default=None)


def _judge(
    history: History, batch: int, place: Place, compiled: Compiled, timed: Timed, capacity_bytes: int | None
) -> tuple[Status, tuple[Remark, ...]]:
    """A row's status, and all that there is to say about it; why it has that status comes first."""
    status, why = _find_status(compiled, timed, capacity_bytes)
    reasons = [Remark(kind=status, words=words) for words in why if status != "ok"]
    remarks = [Remark(kind="method", words=words) for words in compiled.notes]
    if history.in_process:
        remarks.append(Remark(kind="method", words="in this process"))
    if compiled.second_try and place.second_try:
        remarks.append(Remark(kind="compiler", words=place.second_try))
    if compiled.from_cache:
        remarks.append(Remark(kind="compiler", words="from the cache, as compiled before"))
    has_ended = timed.has_ended or compiled.failure
    if place.runs and history.settings.time and not (history.complete or has_ended):
        remarks.append(Remark(kind="pending", words="not timed yet"))
    if timed.batch not in (None, batch):
        remarks.append(Remark(kind="batch", words=f"timed at batch {timed.batch}"))
    others = [*timed.remarks, *_remark_on_spread(timed), *_remark_on_peak(timed.peak)]
    return status, (*reasons[:1], *remarks, *others, *reasons[1:])


def _find_status(compiled: Compiled, timed: Timed, capacity_bytes: int | None) -> tuple[Status, list[str]]:
    """And why, in one remark or two. What the machine had no memory or time for is not the method's fault."""
    if failure := compiled.failure or timed.failure:
        return _STATUS_OF_LACK.get(compiled.lacked, "failed"), [failure]
    if not compiled.fits(capacity_bytes):
        too_much = f"needs {format_bytes(compiled.peak_bytes)}, {format_bytes(capacity_bytes)} available"
        return "refused", list(filter(None, [too_much, timed.refused or timed.skipped]))
    if timed.refused:
        return "refused", [timed.refused]
    if timed.skipped:
        return "skipped", [timed.skipped]
    return "ok", []


def _remark_on_spread(timed: Timed) -> list[Remark]:
    """The advice is what has not been asked for yet."""
    if not (timed.time_s and timed.iqr_s and timed.iqr_s > UNSTEADY * timed.time_s):
        return []
    advice = "close other programs"
    if any(remark.kind == "runs" for remark in timed.remarks):
        advice += ", or give it a longer --time-limit"
    elif count_processes(timed.samples) == 1:
        advice += f", or time more runs: --runs {2 * len(timed.samples)}"
    return [Remark(kind="spread", words=f"the times spread by {timed.iqr_s / timed.time_s:.0%}", advice=advice)]


def _remark_on_peak(peak: Peak | None) -> list[Remark]:
    if not (peak and peak.measured_bytes and peak.is_far_from_xla):
        return []
    apart = peak.measured_bytes / peak.xla_bytes - 1
    measured, planned = format_bytes(peak.measured_bytes), format_bytes(peak.xla_bytes)
    side = "above" if apart > 0 else "below"
    words = f"measured peak {measured} at batch {peak.batch}, {abs(apart):.0%} {side} XLA's {planned}"
    return [Remark(kind="peak", words=words)]


def _ratio(value: float | None, unit: float | None) -> float | None:
    return value / unit if value is not None and unit else None
