"""``Options``: the options that ``grad_stats`` and its kin take as keyword arguments, in one record."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import jax

from pegprof.errors import PegprofError

if TYPE_CHECKING:
    from pegprof.engine.plan import Plan

Argnums = int | tuple[int, ...]
BatchAxes = str | tuple[str, ...] | jax.NamedSharding | None
Fn = TypeVar("Fn", bound=Callable[..., Any])


class TrainArgs(TypedDict, total=False):
    """The keyword arguments of a step of training, whose parameters are its first argument; see ``Options``."""

    batch_argnums: Argnums
    keep_batch_dim: bool
    has_aux: bool
    prng_argnum: int | None
    microbatch_size: int | None
    backend: str | None
    memory_budget: int | None
    batch_axes: BatchAxes
    param_shardings: Any


class PlanArgs(TrainArgs, total=False):
    """Those that a plan depends on."""

    argnums: Argnums


class OptionArgs(PlanArgs, total=False):
    """All of them."""

    plan: "Plan | None"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a loss takes, and how its statistics are computed; see ``grad_stats``. Named as by optax and jax_privacy."""

    argnums: Argnums = 0
    batch_argnums: Argnums = 1
    keep_batch_dim: bool = True
    has_aux: bool = False
    prng_argnum: int | None = None
    microbatch_size: int | None = None
    backend: str | None = None
    plan: "Plan | None" = None
    memory_budget: int | None = None
    batch_axes: BatchAxes = None
    param_shardings: Any = None

    @property
    def batch(self) -> tuple[int, ...]:
        return (self.batch_argnums,) if isinstance(self.batch_argnums, int) else tuple(self.batch_argnums)

    @property
    def params(self) -> tuple[int, ...]:
        return (self.argnums,) if isinstance(self.argnums, int) else tuple(self.argnums)

    def of(self, args: Sequence[Any]) -> "Options":
        """The same for some arguments: negative positions, which count from the end, are made positive."""

        def counted(numbers: Any, role: str, option: str) -> Any:
            if isinstance(numbers, tuple | list):
                return tuple(counted(number, role, option) for number in numbers)
            if not -len(args) <= numbers < len(args):
                what = f"{role} argument {numbers}, but only {len(args)} arguments were given"
                raise PegprofError(what, hint=f"see {option}")
            return numbers % len(args)

        return dataclasses.replace(
            self,
            argnums=counted(self.argnums, "the parameters are", "argnums"),
            batch_argnums=counted(self.batch_argnums, "the batch is", "batch_argnums"),
            prng_argnum=None if self.prng_argnum is None else counted(self.prng_argnum, "the key is", "prng_argnum"),
        )

    def differs(self, argnum: int) -> bool:
        """Whether an argument is different for each example."""
        return argnum in self.batch or argnum == self.prng_argnum


def takes_options(names: Any) -> Callable[[Fn], Fn]:
    """Spell out, in a function's signature, the options of a TypedDict that it takes as ``**options``."""
    spelled = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in dataclasses.fields(Options)
        if field.name in names.__optional_keys__
    ]

    def decorate(fn: Fn) -> Fn:
        own = [p for p in inspect.signature(fn).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        signature = inspect.signature(fn).replace(parameters=[*own, *spelled])

        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            unknown = kwargs.keys() - signature.parameters.keys()
            if unknown:
                raise TypeError(f"{fn.__name__}() got an unexpected keyword argument {min(unknown)!r}")
            return fn(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return cast(Fn, checked)

    return decorate
