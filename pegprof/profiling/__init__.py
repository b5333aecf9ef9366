"""The measuring. ``profile`` is ``pegprof run`` in Python; it uses the engine through its public names only."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pegprof.errors import PegprofError
from pegprof.profiling import progress as _progress
from pegprof.profiling.arguments import check_batches
from pegprof.profiling.result import DEFAULT_BATCH, METHODS, Result, Settings
from pegprof.profiling.steps import choose_stats

if TYPE_CHECKING:
    from pegprof.problem import Problem


def profile(
    problem: "str | Problem",
    *,
    batch: int | Sequence[int] = DEFAULT_BATCH,
    options: Mapping[str, Any] | None = None,
    methods: Sequence[str] = METHODS,
    stats: Sequence[str] | None = None,
    step: str | None = None,
    progress: bool = False,
    **settings: Any,
) -> Result:
    """What per-example gradient statistics of a model cost, by every method, beside its plain gradient.

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
      progress: whether to tell on stderr what is being done.
      **settings: further fields of ``Settings``: ``time``, ``runs``, ``time_limit_s``, ``memory_limit_bytes``, ...

    Returns:
      A Result: ``print`` it for the table; ``.rows``, ``.verdict``, ``.samples_s``, ``.to_frame()``, ``.to_json()``.
    """
    from pegprof.profiling.measure import measure

    unimportable = None if isinstance(problem, str) else _check_problem(problem, options)
    asked = Settings(
        model=problem if isinstance(problem, str) else problem.name,
        options=_check_options(options or {}),
        batches=check_batches((batch,) if isinstance(batch, int) else batch),
        methods=tuple(methods),
        stats=choose_stats(stats, step),
        step=step,
        **settings,
    )
    with _progress.listen(quiet=not progress) as talk:
        return measure(asked, talk=talk, problem=unimportable)


def _check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """They are handed to other processes, and are in the result's JSON."""
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        hint = "pass numbers, strings or booleans, as --set would"
        raise PegprofError(f"the options cannot be handed to another process: {error}", hint=hint) from error
    return dict(options)


def _check_problem(problem: Any, options: Any) -> "Problem":
    from pegprof.problem import Problem

    if not isinstance(problem, Problem):
        what = f"a {type(problem).__name__} cannot be measured"
        raise PegprofError(what, hint="pass the name of a model, 'file.py:name' or a pegprof.Problem")
    if options:
        raise PegprofError("a Problem takes no options", hint="make it with the options that you want")
    return problem
