"""Settings: what was asked for, and what every value of it may be."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from pegprof.errors import PegprofError, nearest

METHODS = ("grad", "vmap", "microbatch", "surgery")
STATS = ("mean", "second_moment")
FORMULAS: Mapping[str, str] = {
    "mean": "mean of g",
    "second_moment": "mean of g²",
    "sign_mean": "mean of sign(g)",
    "abs_mean": "mean of |g|",
    "fourth_moment": "mean of g⁴",
    "variance": "sum of (g - mean)² / (B - 1)",
    "mean_squared": "mean² - variance / B, the unbiased estimate of µ²",
    "snr": "mean² / variance",
    "norm": "‖g‖ over all parameters, for each example",
    "norm_by_param": "‖g‖ over one parameter, for each example",
}
"""Every statistic by name: the engine's table again, which imports jax, so that a wrong name is reported at once."""
DEFAULT_BATCH = 64
MIN_RUNS = 3
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for.

    Args:
      model: a zoo name, ``package.module:name`` or ``file.py:name``.
      options: the model's options by name, as ``load_problem`` takes them.
      batches: the batch sizes to measure.
      targets: which devices to compile for; none means the one of this machine, the only one that anything is run on.
      methods: which methods, in the order of the report.
      stats: which statistics, by name.
      microbatch_size: how many examples the method ``microbatch`` takes at a time.
      time: whether to run anything; without it the report stands on compiles alone.
      warmup: runs of each method that do not count.
      runs: rounds that count, in each process; None takes as many as are worth their time.
      processes: how many times the processes that run methods are started, one set after the other, at most; in a
        result, how many there was time for.
      processes_within_s: have no more of them than end within so many seconds, but three; None for the time limit.
      time_limit_s: for everything. What is compiled first is compiled in any case; then nothing is run for longer, and
        the batch that is timed is halved until it fits.
      memory_limit_bytes: refuse what needs more; None takes what is free.
      planned_bytes: plan, and refuse, as if this much of the host's memory were available, whatever is free: to repeat
        another run exactly.
      check: whether to compare the methods' statistics before they are timed, and to check that examples do not
        interact.
      cache: whether to take what a compiler for a device that is not here once answered, where it would be the same.
      kernels: whether surgery may use fused kernels, on a TPU or an NVIDIA GPU.
      seed: of the parameters and the data.
      mesh: the sizes of the axes that the devices of a slice are arranged in, by name; empty for all along ``data``.
      step: an optimizer, by name: whole steps of training are measured, its state included. ``stats`` are those that it
        takes (``steps.choose_stats``).
    """

    model: str
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    batches: tuple[int, ...] = (DEFAULT_BATCH,)
    methods: tuple[str, ...] = METHODS
    stats: tuple[str, ...] = STATS
    microbatch_size: int = 1
    time: bool = True
    warmup: int = 1
    runs: int | None = None
    time_limit_s: float = 585.0
    memory_limit_bytes: int | None = None
    planned_bytes: int | None = None
    check: bool = True
    seed: int = 0
    targets: tuple[str, ...] = ()
    cache: bool = True
    kernels: bool = True
    step: str | None = None
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    processes: int = 1
    processes_within_s: float | None = None

    @property
    def least_runs(self) -> int:
        """Fewer are not worth much; the batch is cut before the runs are."""
        return min(self.runs or MIN_RUNS, MIN_RUNS)


def check_batches(sizes: Iterable[int]) -> tuple[int, ...]:
    """
    >>> check_batches([8, 16])
    (8, 16)
    """
    batches = tuple(sizes)
    for batch in batches:
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise PegprofError(f"{batch!r} is not a batch size", hint="write a number of examples, 1 or more")
    if not batches:
        raise PegprofError("there is no batch size", hint="name at least one")
    if twice := find_double(batches):
        raise PegprofError(f"the batch size {twice} is named twice", hint="name each once")
    return batches


def check_methods(names: Iterable[str], *, where: str = "") -> tuple[str, ...]:
    """
    >>> check_methods(["grad", "vmap"])
    ('grad', 'vmap')
    """
    return _check_names(names, METHODS, kind="method", where=where)


def check_stats(names: Iterable[str], *, where: str = "") -> tuple[str, ...]:
    """
    >>> check_stats(["mean", "norm"])
    ('mean', 'norm')
    """
    return _check_names(names, FORMULAS, kind="statistic", where=where)


def _check_names(names: Iterable[str], known: Collection[str], *, kind: str, where: str) -> tuple[str, ...]:
    checked = tuple(names)
    for name in checked:
        if name not in known:
            raise PegprofError(f"unknown {kind} {name!r}", where=where, hint=nearest(str(name), known))
    if not checked:
        raise PegprofError(f"no {kind} is named", where=where, hint=f"name at least one of {', '.join(known)}")
    if twice := find_double(checked):
        raise PegprofError(f"{twice} is named twice", where=where, hint="name each once")
    return checked


def find_double(names: Iterable[T]) -> T | None:
    """The first that comes twice."""
    return next((name for name, count in Counter(names).items() if count > 1), None)
