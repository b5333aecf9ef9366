"""The one importer of jax's Jaxpr machinery: everything that may move between versions of jax is named here.

The rest of the engine keys its tables by the primitive objects of ``primitives``, never by their names, and holds
Jaxprs that are *flat*: jit, remat, custom_jvp and custom_vjp are inlined; scan, while and cond remain.
"""

import concurrent.futures
import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core.primitives as primitives
import jax.numpy as jnp
from jax._src import source_info_util
from jax._src.core import pvary_p
from jax._src.interpreters import batching
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params
from jax.extend.core import Primitive as _Primitive
from jax.interpreters import partial_eval as pe

from pegprof.user_code import is_users_own, place

Atom = Var | Literal
Primitive = Any  # jax.extend.core.Primitive, which is not typed


def _primitive_of(fun: Callable[..., Any], *args: Any) -> Primitive:
    """The primitive of a one-line function, for those that jax.extend does not export."""
    return jax.make_jaxpr(fun)(*args).jaxpr.eqns[-1].primitive


_pair = jax.ShapeDtypeStruct((2,), "float32")
barrier_p = _primitive_of(jax.lax.optimization_barrier, _pair)
split_p = _primitive_of(lambda x: jax.lax.split(x, (1, 1)), _pair)
_callback_ps = (
    _primitive_of(lambda x: jax.pure_callback(lambda y: y, _pair, x), _pair),
    _primitive_of(lambda x: jax.experimental.io_callback(lambda y: y, _pair, x), _pair),
)
_ragged_dot_p = _primitive_of(
    jax.lax.ragged_dot,
    *(jax.ShapeDtypeStruct((2, 2), "float32"), jax.ShapeDtypeStruct((1, 2, 2), "float32")),
    jax.ShapeDtypeStruct((1,), "int32"),
)


_axis_index_p = primitives.axis_index_p


def marker(name: str) -> Primitive:
    """A primitive that returns its last operands, ``returned`` of them; its other parameters are whatever is bound.

    It can be traced and batched, and not compiled: who puts it into a Jaxpr takes it out again.
    """
    primitive = _Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *avals, returned, **_: avals[len(avals) - returned :])

    def batch(values: Sequence[Any], axes: Sequence[Any], *, returned: int, **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*values, returned=returned, **params), axes[len(axes) - returned :]

    batching.primitive_batchers[primitive] = batch
    return primitive


def abstract(x: Any, shape: Sequence[int] | None = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """What to trace with, from a value or an abstract value: its varying axes, a shape and a dtype, others if given."""
    aval = x if hasattr(x, "manual_axis_type") else jax.typeof(x)
    weak = getattr(aval, "weak_type", False) and shape is None and dtype is None
    shape = aval.shape if shape is None else tuple(shape)
    dtype = aval.dtype if dtype is None else dtype
    if not varying_axes(aval):
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
    sharding = jax.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P())
    manual = aval.manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak, sharding=sharding, manual_axis_type=manual)


def varying_axes(x: Any) -> frozenset[str]:
    """The axes of a ``shard_map`` that checks them (``check_vma=True``) along which a value differs by its type."""
    aval = x if hasattr(x, "manual_axis_type") else jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


def vary(x: Any, axes: Iterable[str]) -> Any:
    """A value whose type says that it differs along some axes of a ``shard_map``; nothing is computed."""
    missing = tuple(sorted(set(axes) - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def explicit_sharding(x: Any) -> jax.NamedSharding | None:
    """How a value is sharded over the explicit axes of a mesh, by its type; None if there are none."""
    if isinstance(x, jax.ShapeDtypeStruct) or not hasattr(x, "dtype"):
        return None
    sharding = jax.typeof(x).sharding
    return sharding if jax.sharding.AxisType.Explicit in sharding.mesh.axis_types else None


def collective_axes(eqn: JaxprEqn) -> frozenset[Any]:
    """The axes along which an equation combines what devices have; none for what only asks where it runs."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    if eqn.primitive in (pvary_p, _axis_index_p) or not isinstance(named, str | tuple):
        return frozenset()
    return frozenset((named,) if isinstance(named, str) else (a for a in named if isinstance(a, str)))


def zeros_like(aval: Any, dtype: Any = None) -> jax.Array:
    """Zeros of the shape and varying axes of an abstract value: what a loop's carry starts from."""
    return vary(jnp.zeros(aval.shape, dtype or aval.dtype), varying_axes(aval))


def shape_of(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def size_of(atom: Atom) -> int:
    return math.prod(shape_of(atom))


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The atoms that are not literals."""
    return [v for v in atoms if isinstance(v, Var)]


def dtype_of(atom: Atom) -> Any:
    return getattr(atom.aval, "dtype", None)


def close(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> ClosedJaxpr:
    return ClosedJaxpr(jaxpr, consts)


def trace(fun: Callable[..., Any], avals: Iterable[Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(fun)(*map(abstract, avals))


def equations_of(fun: Callable[..., Any], taken: Sequence[Var]) -> tuple[list[JaxprEqn], list[Atom]]:
    """A function of the values of some variables, as equations that take these variables, and its results."""
    closed = trace(fun, [v.aval for v in taken])
    named: dict[Var, Atom] = dict(zip(closed.jaxpr.invars, taken, strict=True))
    named |= {v: Literal(x, jax.typeof(x)) for v, x in zip(closed.jaxpr.constvars, closed.consts, strict=True)}

    def rename(atoms: Sequence[Atom]) -> list[Atom]:
        return [named.get(v, v) if isinstance(v, Var) else v for v in atoms]

    return [eqn.replace(invars=rename(eqn.invars)) for eqn in closed.jaxpr.eqns], rename(closed.jaxpr.outvars)


def with_outputs(closed: ClosedJaxpr, outputs: Sequence[Atom]) -> ClosedJaxpr:
    """The same program with other outputs; what they don't need is removed, every input is kept."""
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(outvars=list(outputs), debug_info=jaxpr.debug_info.with_unknown_names())
    jaxpr, _ = pe.dce_jaxpr(jaxpr, [True] * len(outputs), instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


def prune(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Remove dead code, keeping every input and output."""
    return with_outputs(closed, closed.jaxpr.outvars)


def used_inputs(closed: ClosedJaxpr) -> list[bool]:
    """Of each input: whether an output depends on it, as far as removing dead code can tell."""
    _, used = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return list(used)


def sub_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The Jaxprs that an equation holds as parameters: a scan's body, a cond's branches."""
    yield from jaxprs_in_params(eqn.params)


def source_line(eqn: JaxprEqn) -> str:
    """The user's file and line that an equation comes from; failing that, a line of a package that is not JAX."""
    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    own = [frame for frame in frames if _is_users_own(frame.file_name)]
    innermost = next(iter(own or frames), None)
    return place(innermost.file_name, innermost.start_line) if innermost else ""


def source_function(eqn: JaxprEqn) -> str:
    """The innermost line outside JAX that an equation comes from, and its function: ``_adding.py:12 (update_fn)``."""
    frame = next(iter(source_info_util.user_frames(eqn.source_info.traceback)), None)
    return f"{place(frame.file_name, frame.start_line)} ({frame.function_name})" if frame else ""


_is_users_own = functools.cache(is_users_own)


def _has_users_line(eqn: JaxprEqn) -> bool:
    return any(_is_users_own(frame.file_name) for frame in source_info_util.user_frames(eqn.source_info.traceback))


def at_line_of_call(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """An equation inlined from a call: with the source line of the call where it has no line of the user's own."""
    if _has_users_line(eqn) or (source_line(eqn) and not _has_users_line(call)):
        return eqn
    return eqn.replace(source_info=eqn.source_info.replace(traceback=call.source_info.traceback))


def bind(eqn: JaxprEqn, values: Sequence[Any], **changed_params: Any) -> list[Any]:
    """Apply an equation to values, keeping the user's source line and name stack on what it traces."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed_params})
    if eqn.primitive is primitives.dot_general_p:  # as batched by jax.hessian its operands may differ in their axes
        axes = frozenset[str]().union(*map(varying_axes, values))
        values = [vary(x, axes) for x in values] if axes else values
    with source_of(eqn):
        out = eqn.primitive.bind(*values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def source_of(eqn: JaxprEqn) -> Iterator[None]:
    """What is traced in this context has the user's source line and name stack of an equation."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        yield


def outside_trace(fn: Callable[[], Any]) -> Any:
    """What a function returns that computes with concrete values, whatever is being traced, on whatever mesh.

    Both are known to one thread alone. ``jax.ensure_compile_time_eval`` fails inside a ``shard_map``.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(fn).result()


Rule = Callable[[JaxprEqn, Sequence[Any]], list[Any]]


class Env(dict[Var, Any]):
    """The values of variables; a literal is its own value."""

    def read(self, atoms: Iterable[Atom]) -> list[Any]:
        return [atom.val if isinstance(atom, Literal) else self[atom] for atom in atoms]

    def write(self, atoms: Iterable[Atom], values: Iterable[Any]) -> None:
        for atom, value in zip(atoms, values, strict=True):
            if not isinstance(atom, Literal):
                self[atom] = value

    def run(self, equations: Iterable[JaxprEqn], rule: Rule = bind) -> None:
        for eqn in equations:
            self.write(eqn.outvars, rule(eqn, self.read(eqn.invars)))


def start(closed: ClosedJaxpr, args: Sequence[Any]) -> Env:
    """The environment in which a Jaxpr's equations are evaluated."""
    env = Env()
    env.write(closed.jaxpr.constvars, closed.consts)
    env.write(closed.jaxpr.invars, args)
    return env


def evaluate(closed: ClosedJaxpr, args: Sequence[Any], rule: Rule = bind) -> list[Any]:
    """Evaluate a Jaxpr, each equation by ``rule``."""
    env = start(closed, args)
    env.run(closed.jaxpr.eqns, rule)
    return env.read(closed.jaxpr.outvars)


_CALLS = {
    primitives.jit_p: "jaxpr",
    primitives.call_p: "call_jaxpr",
    primitives.closed_call_p: "call_jaxpr",
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
    primitives.remat_p: "jaxpr",
}


def called_by(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program that an equation does nothing but call, on its own inputs; None for any other equation."""
    if eqn.primitive not in _CALLS:
        return None
    inner = eqn.params[_CALLS[eqn.primitive]]
    return inner if isinstance(inner, ClosedJaxpr) else close(inner)


def unbatchable_reason(eqn: JaxprEqn) -> str | None:
    """Why ``jax.vmap`` cannot batch an equation, or None if it can."""
    name, p = eqn.primitive.name, eqn.primitive
    if getattr(eqn.params.get("effect", None), "ordered", False) or eqn.params.get("ordered", False):
        return f"{name} has an ordered effect ({source_line(eqn)})"
    if p in _callback_ps and eqn.params.get("vmap_method", "") is None:
        return f"{name} has no vmap_method ({source_line(eqn)})"
    if p is _ragged_dot_p:  # it has a rule, which raises where an operand, such as a parameter, is not batched
        return f"{name} cannot be batched ({source_line(eqn)})"
    if eqn.invars and p not in batching.fancy_primitive_batchers and p not in _CALLS:
        return f"{name} has no batching rule ({source_line(eqn)})"
    inner = (unbatchable_reason(inner_eqn) for sub in sub_jaxprs(eqn) for inner_eqn in sub.eqns)
    return next((reason for reason in inner if reason), None)
