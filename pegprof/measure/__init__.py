"""The measuring. ``profile`` is ``pegprof run`` in Python; it uses the engine through its public names only."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegprof.errors import PegprofError, nearest
from pegprof.measure import progress as _progress
from pegprof.result.result import Result
from pegprof.result.settings import DEFAULT_BATCH, METHODS, Settings, check_batches, check_methods
from pegprof.result.steps import choose_stats
from pegprof.targets import meshes
from pegprof.units import parse_bytes, parse_duration

if TYPE_CHECKING:
    from pegprof.models.problem import Problem

_DEFAULT = Settings(model="")
_FIELDS = ("batches", "targets", "memory_limit_bytes", "time_limit_s", "planned_bytes")
"""Of Settings, that are taken by these names too."""
_AS_IN_THE_COMMAND = {
    **{f"no_{name}": f"{name}=False" for name in ("time", "check", "cache", "kernels")},
    "set": "options={...}",
    "seq_len": "options={'seq_len': ...}",
    "dtype": "options={'dtype': ...}",
    "quiet": "progress=False",
    "export_csv": "profile(...).to_frame().to_csv(...)",
    "export_json": "profile(...).to_json()",
}
"""Options of the command that are something else in Python."""


def profile(
    problem: "str | Problem",
    *,
    batch: int | Sequence[int] = DEFAULT_BATCH,
    options: Mapping[str, Any] | None = None,
    methods: str | Sequence[str] = METHODS,
    stats: str | Sequence[str] | None = None,
    step: str | None = None,
    microbatch_size: int = _DEFAULT.microbatch_size,
    seed: int = _DEFAULT.seed,
    target: str | Sequence[str] = (),
    mesh: str | Mapping[str, int] | None = None,
    memory_limit: str | int | None = None,
    cache: bool = True,
    kernels: bool = True,
    time: bool = True,
    check: bool = True,
    warmup: int = _DEFAULT.warmup,
    runs: int | None = None,
    processes: int = _DEFAULT.processes,
    time_limit: str | float = _DEFAULT.time_limit_s,
    progress: bool = False,
    log: str | os.PathLike[str] | None = None,
    **others: Any,
) -> Result:
    """What per-example gradient statistics of a model cost, by every method, beside its plain gradient.

    The arguments are the options of ``pegprof run``, with its names and defaults, and take what it takes: a string like
    ``"10m"`` or ``"grad,surgery"``, or a number or sequence.

    Args:
      problem: a zoo name, ``package.module:name`` or ``file.py:name``, which fresh processes load; this one never
        starts a JAX backend. Or a ``Problem``, as one defines it in a notebook: no other process could import it, so it
        is measured in this one, and each row's reason says so.
      batch: one batch size or several.
      options: the model's options, as ``--set`` gives them.
      methods: some of ``grad``, ``vmap``, ``microbatch`` and ``surgery``.
      stats: statistics by name, ``mean`` and ``second_moment`` if none are named.
      step: ``adam``, or an optimizer of ``pegprof.optimizers`` by its name: whole steps of training are measured, its
        state included, with the statistics that it takes. ``grad`` is then a step of the plain optimizer beside it.
      microbatch_size: examples at a time for the method ``microbatch``.
      seed: random seed for parameters and data.
      target: the devices to compile for; none means this machine, the only one that anything is run on.
      mesh: the sizes of a slice's axes, by name.
      memory_limit: refuse what needs more: bytes, or a string like ``"20GiB"``.
      cache: whether to use what compilers answered before, for devices that are not here.
      kernels: whether surgery may use fused kernels.
      time: whether to run anything; without it the result stands on compiles alone.
      check: whether to compare the methods' statistics, and to check that examples do not interact.
      warmup: runs of each method before timing.
      runs: timed runs of each method; None takes as many as are worth their time.
      processes: fresh processes to time each method in; 8 for a baseline of ``gate --time``.
      time_limit: for everything: seconds, or a string like ``"10m"``.
      progress: whether to tell on stderr what is being done.
      log: a file to append every event to as it happens. If it exists, the measurement goes on from it.
      **others: fields of ``Settings``, by their names there.

    Returns:
      A Result: ``print`` it for the table; ``.rows``, ``.verdict``, ``.samples_s``, ``.to_frame()``, ``.to_json()``.

    Raises:
      TypeError: there is no such argument; the message names the nearest.
    """
    from pegprof.measure.session import measure

    _check_others(others)
    unimportable = _check_problem(problem, options)
    fields: dict[str, Any] = {
        "model": problem if isinstance(problem, str) else problem.name,
        "options": _check_options(options or {}),
        "batches": check_batches((batch,) if isinstance(batch, int) else batch),
        "methods": check_methods(_names(methods)),
        "stats": choose_stats(None if stats is None else _names(stats), step),
        "step": step,
        "microbatch_size": microbatch_size,
        "seed": seed,
        "targets": tuple(_names(target)),
        "mesh": meshes.parse_mesh(mesh) if isinstance(mesh, str) else dict(mesh or {}),
        "memory_limit_bytes": parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit,
        "cache": cache,
        "kernels": kernels,
        "time": time,
        "check": check,
        "warmup": warmup,
        "runs": runs,
        "processes": processes,
        "time_limit_s": parse_duration(time_limit) if isinstance(time_limit, str) else float(time_limit),
    }
    settings = Settings(**{**fields, **others})
    with _progress.listen(quiet=not progress, command=("run", settings)) as talk:
        return measure(
            settings,
            talk=talk,
            problem=unimportable,
            log_path=None if log is None else Path(log),
        )


def _names(names: str | Sequence[str]) -> Sequence[str]:
    """
    >>> _names("grad,vmap"), _names(("grad",))
    (['grad', 'vmap'], ('grad',))
    """
    return [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else names


def _check_others(others: Mapping[str, Any]) -> None:
    """Fields of Settings may go by their own names; anything else is told what it may have meant."""
    for name in others:
        if name in _FIELDS:
            continue
        known = list(profile.__kwdefaults__ or {})
        hint = f"in Python it is {meant}" if (meant := _AS_IN_THE_COMMAND.get(name)) else nearest(name, known)
        raise TypeError(f"profile() got an unexpected keyword argument {name!r}; {hint}")


def _check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """They are handed to other processes, and are in the result's JSON."""
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        hint = "pass numbers, strings or booleans, as --set would"
        raise PegprofError(f"the options cannot be handed to another process: {error}", hint=hint) from error
    return dict(options)


def _check_problem(problem: Any, options: Any) -> "Problem | None":
    """The Problem that only this process has; None for one that goes by a name."""
    from pegprof.models.problem import Problem, check_spec

    if isinstance(problem, str):
        check_spec(problem)
        return None
    if not isinstance(problem, Problem):
        what = f"a {type(problem).__name__} cannot be measured"
        raise PegprofError(what, hint="pass the name of a model, 'file.py:name' or a pegprof.Problem")
    if options:
        raise PegprofError("a Problem takes no options", hint="make it with the options that you want")
    return problem
