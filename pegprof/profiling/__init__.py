"""The measuring. ``profile`` is ``pegprof run`` in Python; it uses the engine through its public names only."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pegprof.errors import PegprofError
from pegprof.profiling.result import METHODS, STATS, Result, Settings

if TYPE_CHECKING:
    from pegprof.problem import Problem


def profile(
    problem: "str | Problem",
    *,
    batch: int | Sequence[int] = 64,
    options: Mapping[str, Any] | None = None,
    methods: Sequence[str] = METHODS,
    stats: Sequence[str] = STATS,
    **settings: Any,
) -> Result:
    """What per-example gradient statistics of a model cost, by every method, beside its plain gradient.

    Args:
      problem: a zoo name, ``package.module:name`` or ``file.py:name``. It is loaded by fresh processes, so it has to be
        something that they can import; this process never starts a JAX backend.
      batch: one batch size or several.
      options: the model's options, as ``--set`` gives them.
      methods: some of ``grad``, ``vmap``, ``microbatch`` and ``surgery``.
      stats: statistics by name.
      **settings: further fields of ``Settings``: ``time``, ``runs``, ``time_limit_s``, ``memory_limit_bytes``, ...

    Returns:
      A Result: ``.rows``, ``.verdict``, ``.samples_s``, ``.to_frame()``.
    """
    from pegprof.profiling.measure import measure

    if not isinstance(problem, str):
        what = f"a {type(problem).__name__} cannot be measured: the processes that measure could not import it again"
        hint = "put it in a file and pass 'file.py:name'"
        raise PegprofError(what, hint=hint)
    batches = (batch,) if isinstance(batch, int) else tuple(batch)
    asked = Settings(
        model=problem,
        options=dict(options or {}),
        batches=batches,
        methods=tuple(methods),
        stats=tuple(stats),
        **settings,
    )
    return measure(asked, talk=lambda text: None, save=lambda result: None)
