"""A pass looks only into equations whose parameters it understands; any other equation it leaves as it is."""

import functools
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import pegprof.engine
from pegprof.engine import facts
from pegprof.engine.axes import squeezed
from pegprof.engine.facts import FACTS, UNKNOWN, facts_of, is_linear_in, known, permutes
from pegprof.engine.jaxpr import close, primitives, shape_of, trace, variables
from pegprof.engine.passes import flatten as flattening
from pegprof.engine.passes import squeeze
from pegprof.engine.passes.widen import bind_wide
from pegprof.engine.rules import SCHEDULES, strategies
from pegprof.engine.sites import cut_program
from pegprof.engine.structures import can_invert
from pegprof.engine.structures.lookups import adds_rows

p = primitives
F, INTS = jnp.ones((1, 3, 2)), jnp.zeros((3, 1), jnp.int32)
BOOLS, COMPLEX = F > 0, F + 0j

UNARY = (
    "neg abs square sign floor ceil erf erfc erf_inv is_finite exp exp2 expm1 log log1p sqrt rsqrt cbrt sin cos tan "
    "tanh logistic round"
)
BINARY = "add sub div max min pow rem eq ne lt le gt ge mul"
ONE_LINERS = (
    *(functools.partial(getattr(jax.lax, name), F) for name in UNARY.split()),
    *(functools.partial(getattr(jax.lax, name), F, F) for name in BINARY.split()),
    *(functools.partial(getattr(jax.lax, f"bitwise_{name}"), INTS, INTS) for name in ("and", "or", "xor")),
    *(functools.partial(getattr(jax.lax, name), COMPLEX) for name in ("real", "imag", "conj")),
    lambda: jax.lax.bitwise_not(INTS),
    lambda: jax.lax.select_n(BOOLS, F, F),
    lambda: jax.lax.clamp(0.0, F, 1.0),
    lambda: p.stop_gradient_p.bind(F),
    lambda: jnp.copy(F),
    lambda: jax.lax.complex(F, F),
    lambda: jax.lax.integer_pow(F, 3),
    lambda: jax.lax.convert_element_type(F, jnp.bfloat16),
    lambda: p.add_jaxvals_p.bind(F, F),
    lambda: jax.lax.reshape(F, (2, 3)),
    lambda: jax.lax.squeeze(F, (0,)),
    lambda: jax.lax.rev(F, (1,)),
    lambda: jax.lax.broadcast_in_dim(F, (4, 1, 3, 2), (1, 2, 3)),
    lambda: jax.lax.transpose(F, (0, 2, 1)),
    lambda: jax.lax.slice(F, (0, 1, 0), (1, 3, 2)),
    lambda: jax.lax.dynamic_slice(F, (0, 1, 0), (1, 2, 2)),
    lambda: jax.lax.dynamic_update_slice(F, F[:, :1], (0, 1, 0)),
    lambda: jax.lax.optimization_barrier(F),
    lambda: jax.lax.pad(F, 0.0, ((0, 0, 0), (1, 1, 0), (0, 0, 0))),
    lambda: jax.lax.concatenate([F, F], 1),
    lambda: jax.lax.split(F, (1, 2), 1)[0],
    lambda: jax.lax.broadcasted_iota(jnp.float32, (3, 1), 0),
    lambda: jnp.sum(F, axis=1),
    lambda: jnp.max(F, axis=1),
    lambda: jnp.min(F, axis=1),
    lambda: p.reduce_and_p.bind(BOOLS, axes=(1,)),
    lambda: p.reduce_or_p.bind(BOOLS, axes=(1,)),
    lambda: jax.lax.cumsum(F, 1),
    lambda: jax.lax.reduce_window(F, 0.0, jax.lax.add, (1, 2, 1), (1, 1, 1), "VALID"),
    lambda: jax.lax.dot_general(F, F, (((1,), (1,)), ((), ()))),
    lambda: jax.lax.conv_general_dilated(jnp.ones((1, 1, 5, 5)), jnp.ones((2, 1, 3, 3)), (1, 1), "SAME"),
    lambda: F[0].at[INTS[:, 0]].get(mode="promise_in_bounds"),
    lambda: jnp.zeros((3, 2)).at[INTS[:, 0]].add(F[0], mode="promise_in_bounds"),
    lambda: jax.jit(lambda x: x + 1, inline=False)(F),
    lambda: _custom_jvp(F),
    lambda: _custom_vjp(F),
    lambda: jax.checkpoint(lambda x: x + 1)(F),
    lambda: checkpoint_name(F, "kept"),
    lambda: jax.lax.scan(lambda c, x: (c + x, c), F[0, 0], F[0])[1],
    lambda: jax.lax.cond(F[0, 0, 0] > 0, jnp.sin, jnp.cos, F),
)


@jax.custom_jvp
def _custom_jvp(x):
    return x + 1


@jax.custom_vjp
def _custom_vjp(x):
    return x + 1


_custom_jvp.defjvp(lambda primals, tangents: (_custom_jvp(*primals), tangents[0]))
_custom_vjp.defvjp(lambda x: (x + 1, None), lambda _, t: (t,))


KNOWN = {primitive for primitive, its in FACTS.items() if not its.opaque}


def _equations():
    """An equation of each primitive that the passes know, from one line of JAX each."""
    found = {}
    for line in ONE_LINERS:
        for eqn in jax.make_jaxpr(line)().jaxpr.eqns:
            found.setdefault(eqn.primitive, eqn)
    return found


EQUATIONS = _equations()
NOT_BOUND_BY_USERS = {p.call_p, p.closed_call_p}  # JAX's own, left by partial evaluation
PVARY = "pvary"  # only inside a shard_map; see test_sharded.py


def _with_unknown_parameter(eqn):
    return eqn.replace(params={**eqn.params, "unheard_of": 1})


def test_every_known_primitive_has_an_equation_here():
    missing = {q for q in KNOWN if q not in EQUATIONS and q.name != PVARY} - NOT_BOUND_BY_USERS
    assert not missing


@pytest.mark.parametrize("eqn", EQUATIONS.values(), ids=lambda eqn: eqn.primitive.name)
def test_an_equation_as_jax_writes_it_is_known(eqn):
    if eqn.primitive in KNOWN:
        assert known(eqn) is eqn.primitive


@pytest.mark.parametrize("eqn", EQUATIONS.values(), ids=lambda eqn: eqn.primitive.name)
def test_an_equation_with_an_unknown_parameter_is_a_black_box_to_every_pass(eqn, monkeypatch):
    eqn = _with_unknown_parameter(eqn)
    assert facts_of(eqn) is UNKNOWN
    assert known(eqn) is None
    assert not permutes(eqn)
    assert not is_linear_in(eqn, variables(eqn.invars))
    assert not adds_rows(eqn)
    assert not can_invert((eqn,))

    bound = []

    def record(eqn, values, **changed):
        bound.append((eqn, [jnp.shape(x) for x in values], changed))
        return [jnp.zeros(shape_of(v), v.aval.dtype) for v in eqn.outvars]

    values = [jnp.zeros(shape_of(v), v.aval.dtype) for v in eqn.invars]
    for module in (squeeze, flattening):
        monkeypatch.setattr(module, "bind", record)
    squeeze._apply(eqn, [squeezed(x) for x in values])
    flattening._flatten_equation(eqn, values)
    for seen, shapes, changed in bound:
        assert seen is eqn
        assert shapes == [shape_of(v) for v in eqn.invars]
        assert not changed
    assert len(bound) == 2


def test_what_is_opaque_is_a_black_box_with_any_parameters():
    (eqn,) = jax.make_jaxpr(jax.lax.sort)(F).jaxpr.eqns
    assert eqn.primitive in FACTS
    assert facts_of(eqn) is UNKNOWN


def _tables_of_primitives():
    """The collections of primitives that modules of the engine hold beside the facts, by name."""
    for found in pkgutil.walk_packages(pegprof.engine.__path__, "pegprof.engine."):
        module = importlib.import_module(found.name)
        for name, value in vars(module).items():
            is_table = isinstance(value, dict | set | frozenset | tuple | list) and value is not FACTS
            if module is not facts and is_table and any(type(x) is type(p.add_p) for x in value):
                yield f"{found.name}.{name}", value


def test_no_pass_keeps_a_table_of_primitives_of_its_own():
    """Calls and callbacks are named where JAX's machinery is: what they are called moves between its versions."""
    assert set(dict(_tables_of_primitives())) == {"pegprof.engine.jaxpr._CALLS", "pegprof.engine.jaxpr._callback_ps"}


@pytest.mark.parametrize("odd", [("dot_general",), ("transpose",), ("dot_general", "transpose")], ids=" and ".join)
def test_no_rule_looks_into_a_tail_with_an_unknown_parameter(odd):
    operands = [jax.ShapeDtypeStruct((4, 30), "float32"), jax.ShapeDtypeStruct((4, 20), "float32")]
    plain = trace(lambda x_TxD, r_TxE: [(r_TxE.T @ x_TxD).T], operands)
    names = [eqn.primitive.name for eqn in plain.jaxpr.eqns]
    assert names[-2:] == ["dot_general", "transpose"]
    *before, product, moved = plain.jaxpr.eqns
    last = [_with_unknown_parameter(eqn) if eqn.primitive.name in odd else eqn for eqn in (product, moved)]

    def fitting(program):
        (site,) = cut_program(program, {0: "w"}, [True, True]).sites()
        return {name for name, strategy in strategies().items() if strategy.covers(site, ())}, site.unknown

    everything, unknown = fitting(plain)
    assert {"loop", "batched", "gram"} <= everything
    assert unknown is None
    left, unknown = fitting(close(plain.jaxpr.replace(eqns=[*before, *last])))
    assert left
    assert left <= set(SCHEDULES)
    assert unknown in last


def test_an_equation_that_is_not_known_keeps_the_dtype_that_it_was_traced_for():
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.mul(x, x))(jnp.ones(2, jnp.bfloat16)).jaxpr.eqns
    assert bind_wide(eqn, [jnp.ones(2)] * 2)[0].dtype == jnp.float32
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.sort(x))(jnp.ones(2, jnp.bfloat16)).jaxpr.eqns
    assert bind_wide(eqn, [jnp.ones(2)])[0].dtype == jnp.bfloat16


def test_a_reshape_that_permutes_is_a_transpose_and_a_plain_reshape():
    fun = lambda x: jax.lax.reshape(x, (3, 2), (1, 0)) + x.ravel(order="F").reshape(3, 2)
    x = jnp.arange(6.0).reshape(2, 3)
    flat = flattening.flatten(jax.make_jaxpr(fun)(x))
    reshapes = [eqn for eqn in flat.jaxpr.eqns if eqn.primitive is p.reshape_p]
    assert reshapes
    assert all(eqn.params["dimensions"] is None for eqn in reshapes)
    np.testing.assert_array_equal(jax.jit(fun)(x), jnp.asarray(jax.core.eval_jaxpr(flat.jaxpr, flat.consts, x)[0]))
