"""Result -> sentences: what dominates, who disagrees, what that means for the methods, and whether it is worth it.

Every sentence has its numbers in it, and a number that is not known takes its clause with it.
"""

from collections.abc import Iterator, Sequence

from pegprof.result.result import Result, Row
from pegprof.result.verdict import Verdict
from pegprof.units import format_bytes, format_ratio

PAPER_VMAP_TIME_RATIO = 1.17
"""What the paper (arXiv 2510.00236) reports: vmap adds about 17% to the computation."""

# How much more time than the plain gradient is called what. Chosen: the paper calls its 1.17 viable.
AFFORDABLE_TIME_RATIO = 1.25
EXPENSIVE_TIME_RATIO = 2.0


def explain(result: Result) -> list[str]:
    """All that there is to say about a result, in the order in which a person wants to know it."""
    first, *others = result.targets or ("",)
    verdict = result.verdict_on(first)
    sentences = [" ".join(explain_verdict(verdict))] if verdict else []
    sentences += [str(other) for target in others if (other := result.verdict_on(target))]
    for rows in result.groups:
        batch = f"Batch {rows[0].batch}. " if len(result.batches) > 1 else ""
        if others:  # all that can be said of one would be too much of several
            found = explain_affordability(rows, where=f"on {rows[0].target}")
        else:
            found = explain_batch(rows, verdict, where=_where(result))
        sentences += [batch + sentence for sentence in found]
    return sentences


def _where(result: Result) -> str:
    return f"on {result.targets[0]}" if result.settings.targets else "here"


def explain_verdict(verdict: Verdict) -> Iterator[str]:
    """What dominates by XLA's figure, by the trace and by the paper's rule."""
    yield str(verdict)
    if verdict.trace_says is not None and verdict.xla_says is not None:
        traced = format_bytes(verdict.traced_bytes_per_example)
        if verdict.trace_says == verdict.activations_dominate:
            yield f"The trace counts {traced}, and agrees."
        else:
            why = "shares or recomputes some of that" if verdict.trace_says else "keeps more than that"
            yield f"The trace disagrees: it counts {traced}; XLA {why}."
    if verdict.rule_share is not None:
        share = f"T ≥ D for {_percent(verdict.rule_share)} of the parameters in matrices"
        if verdict.activations_dominate is None:
            yield f"By the paper's rule {'activations' if verdict.rule_says else 'parameters'} dominate: {share}."
        elif verdict.rule_says == verdict.activations_dominate:
            yield f"The paper's rule agrees: {share}."
        else:
            blind_to = "what is recomputed or fused" if verdict.rule_says else "what attention, norms and the like keep"
            yield f"The paper's rule disagrees: {share}; it is blind to {blind_to}."


def explain_batch(rows: Sequence[Row], verdict: Verdict | None, *, where: str = "here") -> Iterator[str]:
    """What it means for the methods at one batch size, and for optimizers that need the statistics at every step."""
    by_method = {row.method: row for row in rows if row.peak_bytes is not None}
    vmap, surgery = by_method.get("vmap"), by_method.get("surgery")
    if vmap and verdict:
        yield _explain_vmap(vmap, verdict)
    if surgery:
        yield _explain_surgery(surgery)
    yield from explain_affordability(rows, where=where)


def _explain_vmap(vmap: Row, verdict: Verdict) -> str:
    gradients = format_bytes(vmap.batch * verdict.parameter_bytes)
    formed = f"the gradients of {vmap.batch} examples, {gradients},"
    if not verdict.activation_bytes_per_example:
        sentence = f"vmap: it forms {formed} and takes {_cost(vmap)}"
    else:
        activations = format_bytes(vmap.batch * verdict.activation_bytes_per_example)
        if verdict.activations_dominate:
            room = f"could live where {activations} of activations have died"
        else:
            room = f"are more than the {activations} of activations leave room for"
        sentence = f"vmap: {formed} {room}; it takes {_cost(vmap)}"
    if vmap.time_ratio is not None:
        sentence += f" (the paper: about {format_ratio(PAPER_VMAP_TIME_RATIO)} ×, {PAPER_VMAP_TIME_RATIO - 1:.0%} more)"
    return f"{sentence}."


def _explain_surgery(surgery: Row) -> str:
    kept = "keeps no example's gradient beyond its own layer, whatever dominates"
    if count := surgery.materialised_parameters:
        kept += f", but materialises those of {count} parameter{'s' if count > 1 else ''}"
    return f"surgery: {kept}; it takes {_cost(surgery)}."


def _cost(row: Row) -> str:
    """
    >>> _cost(Row(model="", batch=1, stats="", method="vmap", target="", evidence="measured", status="ok",
    ...           peak_bytes=1024, peak_ratio=1.5, time_ratio=2.0))
    '1.50 × the memory of grad and 2.00 × its time'
    """
    if row.peak_ratio is None:
        return format_bytes(row.peak_bytes)
    time = f" and {format_ratio(row.time_ratio)} × its time" if row.time_ratio is not None else ""
    return f"{format_ratio(row.peak_ratio)} × the memory of grad{time}"


def explain_affordability(rows: Sequence[Row], *, where: str = "here") -> Iterator[str]:
    """One plain sentence on whether an optimizer that takes the statistics at every step is affordable, and why; none
    if nobody asked for a method that computes them."""
    contenders = [row for row in rows if row.method != "grad" or _is_plain(row)]
    if contenders:
        yield _judge([row for row in contenders if row.peak_bytes is not None], _name_optimizer(rows[0]), where)


def _judge(contenders: Sequence[Row], who: str, where: str) -> str:
    fitting = [row for row in contenders if row.status in ("ok", "skipped")]  # skipped for want of time, not of memory
    refused = [row for row in contenders if row.status == "refused"]
    if refused and not fitting:
        least = min(refused, key=_peak_bytes)
        needs = f"{least.method}, which needs least, needs {format_bytes(least.peak_bytes)}"
        return f"{who} is not affordable {where}: {needs}, and there are {format_bytes(least.capacity_bytes)}."
    if not fitting:
        return f"{who} cannot be judged: no method but grad ended well."
    timed = [row for row in fitting if row.time_ratio is not None]
    best = min(timed, key=_time_ratio) if timed else min(fitting, key=_peak_bytes)
    memory = format_bytes(best.peak_bytes)
    if best.capacity_bytes is not None:
        memory += f" of {format_bytes(best.capacity_bytes)} available"
    if best.peak_ratio is not None:
        memory += f", {format_ratio(best.peak_ratio)} × grad"
    if not timed:
        return f"{who} fits in memory {where}: {best.method} takes {memory}. Its time is not measured."
    cost = f"{best.method} takes {format_ratio(best.time_ratio)} × the time of grad, and {memory}"
    return f"{who} is {_price(_time_ratio(best))} {where}: {cost}."


def _is_plain(row: Row) -> bool:
    """Whether it is of a step that takes the mean alone: ``grad`` is then that step too, and as good as any."""
    return row.step is not None and row.stats == "mean"


def _name_optimizer(row: Row) -> str:
    takes = _list(row.stats.split(","))
    if row.step is None:
        return f"A Micro optimizer, which takes {takes} at every step,"
    return f"A step of {row.step}" if _is_plain(row) else f"A step of {row.step}, which takes {takes},"


def _price(time_ratio: float) -> str:
    if time_ratio <= AFFORDABLE_TIME_RATIO:
        return "affordable"
    return "affordable at a price" if time_ratio <= EXPENSIVE_TIME_RATIO else "expensive"


def _peak_bytes(row: Row) -> int:
    assert row.peak_bytes is not None
    return row.peak_bytes


def _time_ratio(row: Row) -> float:
    assert row.time_ratio is not None
    return row.time_ratio


def _percent(share: float) -> str:
    """
    >>> _percent(1.0), _percent(0.996), _percent(0.18), _percent(0.001), _percent(0.0)
    ('all', 'over 99%', '18%', 'under 1%', 'none')
    """
    if share in (0.0, 1.0):
        return "all" if share else "none"
    if share > 0.99:
        return "over 99%"
    return "under 1%" if share < 0.01 else f"{share:.0%}"


def _list(names: Sequence[str]) -> str:
    """
    >>> _list(["a"]), _list(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
