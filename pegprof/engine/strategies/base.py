"""What a strategy is, what it sees, and the tail evaluated in float32 at least."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.costs import Cost
from pegprof.engine.facts import known
from pegprof.engine.jaxpr import Env, JaxprEqn, Rule, bind, dtype_of, primitives, sub_jaxprs
from pegprof.engine.quantities import Values
from pegprof.engine.statistics import Quantity
from pegprof.engine.tails import Tail, is_real


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frontier:
    """A tail's inputs for all B examples; those that are not ``batched`` are the same for every example."""

    values: Sequence[Any]
    batched: Sequence[bool]
    B: int

    def examples(self) -> list[Any]:
        return [x for x, b in zip(self.values, self.batched, strict=True) if b]

    def with_examples(self, examples: Sequence[Any]) -> list[Any]:
        """The inputs with the batched ones replaced: by one example's, or by some examples'."""
        replaced = iter(examples)
        return [next(replaced) if b else x for x, b in zip(self.values, self.batched, strict=True)]

    def of(self, tail: Tail, part: Tail) -> "Frontier":
        """What a part of the tail takes of this."""
        kept = [i for i, v in enumerate(tail.inputs) if v in part.inputs]
        return Frontier(values=[self.values[i] for i in kept], batched=[self.batched[i] for i in kept], B=self.B)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to get quantities at a site.

    Args:
      name: as the plan shows it.
      why: what makes it the right one, for people.
      fits: whether it can give these quantities at a tail.
      run: the quantities of each of the tail's gradients; the last argument is how many gradients may be held at once.
      cost: what it takes for a batch: from the tail, the quantities, B and how many gradients may be held at once.
      recomputes: whether it makes operands anew for each example, rather than have them stored for all.
      frees_memory: whether it lets go of large operands early; taken before others where memory is what runs out.
    """

    name: str
    why: str
    fits: Callable[[Tail, Sequence[Quantity]], bool]
    run: Callable[[Tail, Sequence[Quantity], Frontier, int], list[Values]]
    cost: Callable[[Tail, Sequence[Quantity], int, int], Cost]
    recomputes: bool = False
    frees_memory: bool = False


def bind_wide(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Apply an equation to operands that may be wider than it was traced for, and ask for float32 at least.

    Products keep their narrow operands, which is what the hardware is fast at, and only widen what they add up.
    """
    values = [
        jnp.asarray(x, None if hasattr(x, "dtype") else dtype_of(v)) for x, v in zip(values, eqn.invars, strict=True)
    ]
    floats = [x.dtype for x in values if is_real(x.dtype)]
    if not floats:
        return bind(eqn, values)
    if _goes_by_dtype(eqn):
        return bind(eqn, [x.astype(dtype_of(v)) for x, v in zip(values, eqn.invars, strict=True)])
    wide = _wide_of(floats)
    if eqn.primitive in (primitives.dot_general_p, primitives.conv_general_dilated_p) and len(set(floats)) == 1:
        return bind(eqn, values, preferred_element_type=_wide_of([wide, dtype_of(eqn.outvars[0])]))
    values = [x.astype(wide) if is_real(x.dtype) else x for x in values]
    if eqn.primitive is primitives.convert_element_type_p and is_real(eqn.params["new_dtype"]):
        return bind(eqn, values, new_dtype=_wide_of([wide, eqn.params["new_dtype"]]))
    if "preferred_element_type" in eqn.params:
        return bind(eqn, values, preferred_element_type=wide)
    if eqn.primitive is primitives.scatter_add_p and wide != dtype_of(eqn.outvars[0]):
        return [_scatter_add(eqn, values)]  # it holds its addition as a Jaxpr of the narrow dtype
    return bind(eqn, values)


def _goes_by_dtype(eqn: JaxprEqn) -> bool:
    """Whether an equation is of the dtype that it was traced for: it is not known, or it holds a Jaxpr."""
    holds_jaxpr = eqn.primitive is not primitives.scatter_add_p and any(True for _ in sub_jaxprs(eqn))
    return holds_jaxpr or known(eqn) is None


def _wide_of(floats: Iterable[Any]) -> Any:
    """The narrowest of float32 and float64 that holds them all; numpy's promotion would fail on float8."""
    return jnp.float64 if any(dtype == jnp.float64 for dtype in floats) else jnp.float32


def run_wide(tail: Tail, inputs: Sequence[Any], rule: Rule = bind_wide) -> list[Any]:
    """The gradients of one example with nothing rounded below float32 on the way; equations are applied by ``rule``."""
    env = Env()
    env.write(tail.inputs, inputs)
    env.run(tail.prelude)
    env.run(tail.equations, rule)
    return env.read(tail.outputs)


def _scatter_add(eqn: JaxprEqn, values: Sequence[Any]) -> Any:
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    operand, indices, updates = values
    return jax.lax.scatter_add(operand, indices, updates, **{name: eqn.params[name] for name in names})
