"""What the engine knows about each primitive: one table, in families of one-line registrations.

Every pass asks ``facts_of(eqn)``. The default is "unknown": a primitive that is not registered, a parameter that is not
listed, or a value that no rule handles (a sharding, say) gives ``UNKNOWN``, and the equation is applied as it stands.
That is always right, and merely slower. To teach the engine a primitive, add one line here, or call one of the ``def_``
functions from outside.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pegprof.engine import arithmetic, axes, dtypes
from pegprof.engine.jaxpr import JaxprEqn, Literal, Primitive, Var, barrier_p, bind, dtype_of, pvary_p, size_of, split_p
from pegprof.engine.jaxpr import primitives as p

Test = Callable[[Any], bool]
Predicate = Callable[[JaxprEqn], bool]
Linearity = Callable[[JaxprEqn, Sequence[bool]], bool]


def _never(*_: Any) -> bool:
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about a primitive."""

    params: Mapping[str, Test] = dataclasses.field(default_factory=dict)  # those that the rules understand, with tests
    elementwise: bool = False  # of the same entry of the operands, which may broadcast axes of size one
    linear: Linearity = _never  # whether it is jointly linear in the marked operands, with the others fixed
    permutes: Predicate = _never  # whether the result has the operand's entries, each once, in another order or shape
    joins: bool = False  # it may take in a second value of the example; the gradient it continues stays a gradient
    adds: bool = False  # the sum of its two operands
    contracts: bool = False  # a product that sums: it forms a gradient from two values of the example
    cheap: bool = False  # its result is recomputed from its operands rather than stored
    view: bool = False  # its result shares its operand's memory
    random: bool = False  # it draws random numbers
    flops: Callable[[JaxprEqn], int] | None = None
    flop_kind: str = "other_flops"  # the field of ``Cost`` that these count towards
    squeeze: axes.Rule | None = None  # applies it to operands without axes of size one; None puts the axes back first
    widen: dtypes.Rule | None = None  # applies it in float32 or wider; None keeps the dtype that it was traced with
    invert: Callable[[JaxprEqn, Any], Any] | None = None  # the operand of a permuting equation from its result
    opaque: bool = False  # no pass looks into it, whatever its parameters

    @property
    def continues_gradients(self) -> bool:
        """Whether it may stand in a tail that rules understand."""
        return self.contracts or self.joins or self.linear is not _never


UNKNOWN = Facts()
FACTS: dict[Primitive, Facts] = {}


def facts_of(eqn: JaxprEqn) -> Facts:
    """The facts about an equation, if all of its parameters are understood; else ``UNKNOWN``."""
    facts = FACTS.get(eqn.primitive, UNKNOWN)
    if facts.opaque or not all(name in facts.params and facts.params[name](x) for name, x in eqn.params.items()):
        return UNKNOWN
    return facts


def known(eqn: JaxprEqn) -> Primitive | None:
    """The equation's primitive, if the engine understands it; else None."""
    return None if facts_of(eqn) is UNKNOWN else eqn.primitive


def is_linear_in(eqn: JaxprEqn, made: Iterable[Var]) -> bool:
    """Whether an equation is jointly linear in the operands in ``made``, with the others fixed."""
    made = set(made)
    return facts_of(eqn).linear(eqn, [isinstance(v, Var) and v in made for v in eqn.invars])


def permutes(eqn: JaxprEqn) -> bool:
    """Whether an equation only permutes entries, so that it commutes with every elementwise function."""
    return facts_of(eqn).permutes(eqn)


def define(*primitives: Primitive, params: str = "", tests: Mapping[str, Test] | None = None, **facts: Any) -> None:
    """Register primitives: ``params`` may have any value, the values of others must pass ``tests``."""
    understood = {**dict.fromkeys(params.split(), lambda value: True), **(tests or {})}
    for primitive in primitives:
        FACTS[primitive] = Facts(params=understood, **facts)


def def_elementwise(*primitives: Primitive, **facts: Any) -> None:
    """Functions of one entry, or of the same entry of several operands."""
    define(*primitives, **{**_ELEMENTWISE, **facts})


def def_permutation(*primitives: Primitive, **facts: Any) -> None:
    """Steps that move entries, as long as they neither drop, repeat nor add any."""
    define(*primitives, **{**_PERMUTATION, **facts})


def def_linear(*primitives: Primitive, **facts: Any) -> None:
    """Linear maps of their operands; by default jointly of all."""
    define(*primitives, **{"linear": jointly, "widen": dtypes.widen_operands, "flops": arithmetic.free, **facts})


def def_reduction(*primitives: Primitive, **facts: Any) -> None:
    """Reductions over ``axes``."""
    understood = {"params": "axes", "tests": {"out_sharding": _unsharded}}
    define(*primitives, **{**understood, "flops": arithmetic.operand_size, "squeeze": axes.reduce, **facts})


def jointly(eqn: JaxprEqn, marked: Sequence[bool]) -> bool:
    """Linear in all operands together."""
    return all(marked)


def in_any_one(eqn: JaxprEqn, marked: Sequence[bool]) -> bool:
    """Linear in each operand, the others fixed."""
    return sum(marked) == 1


def in_the_first(eqn: JaxprEqn, marked: Sequence[bool]) -> bool:
    """Linear in the first operand, the others fixed."""
    return marked[0] and not any(marked[1:])


def _pads_with_zero(eqn: JaxprEqn, marked: Sequence[bool]) -> bool:
    return in_the_first(eqn, marked) and is_zero(eqn.invars[1])


def is_zero(atom: Any) -> bool:
    """Whether an atom is the literal 0."""
    return isinstance(atom, Literal) and bool(np.all(atom.val == 0))


def _between_floats(eqn: JaxprEqn, marked: Sequence[bool]) -> bool:
    return all(jnp.issubdtype(dtype_of(v), jnp.inexact) for v in (*eqn.invars, *eqn.outvars))


def _same_size(eqn: JaxprEqn) -> bool:
    return size_of(eqn.invars[0]) == size_of(eqn.outvars[0])


def _keeps_values(eqn: JaxprEqn) -> bool:
    return dtypes.holds_all_of(dtype_of(eqn.outvars[0]), dtype_of(eqn.invars[0]))


def _none(value: Any) -> bool:
    return value is None


def _unsharded(sharding: Any) -> bool:
    """Whether a sharding spreads nothing: JAX gives some equations one over an empty mesh, or over none of its axes."""
    return sharding is None or sharding.mesh.empty or all(axis is None for axis in sharding.spec)


_ELEMENTWISE: dict[str, Any] = {
    "elementwise": True,
    "cheap": True,
    "flops": arithmetic.result_size,
    "squeeze": axes.elementwise,
    "widen": dtypes.widen_operands,
}
_PERMUTATION: dict[str, Any] = {
    "linear": jointly,
    "permutes": _same_size,
    "flops": arithmetic.free,
    "widen": dtypes.widen_operands,
}
_VIEW: dict[str, Any] = {"cheap": True, "view": True}
_RESHAPE: dict[str, Any] = {**_VIEW, "squeeze": axes.reshape, "invert": axes.invert_reshape}
_SHARDED = {"sharding": _unsharded}
_OUT_SHARDED = {"out_sharding": _unsharded}

# ---- the table ------------------------------------------------------------------------------------------------------

# Elementwise.
def_elementwise(p.add_p, p.add_jaxvals_p, linear=jointly, joins=True, adds=True)
def_elementwise(p.sub_p, linear=jointly, joins=True)
def_elementwise(p.neg_p, p.real_p, p.imag_p, linear=jointly)
def_elementwise(p.mul_p, tests={"out_dtype": _none}, linear=in_any_one)
def_elementwise(p.div_p, linear=in_the_first)
def_elementwise(p.select_n_p, joins=True)
def_elementwise(p.max_p, p.min_p, p.pow_p, p.rem_p, p.clamp_p, p.complex_p)
def_elementwise(p.abs_p, p.square_p, p.sign_p, p.floor_p, p.ceil_p, p.erf_p, p.erfc_p, p.erf_inv_p, p.is_finite_p)
def_elementwise(p.exp_p, p.exp2_p, p.expm1_p, p.log_p, p.log1p_p, p.sqrt_p, p.rsqrt_p, p.cbrt_p, params="accuracy")
def_elementwise(p.sin_p, p.cos_p, p.tan_p, p.tanh_p, p.logistic_p, params="accuracy")
def_elementwise(p.eq_p, p.ne_p, p.lt_p, p.le_p, p.gt_p, p.ge_p, p.and_p, p.or_p, p.xor_p, p.not_p)
def_elementwise(p.round_p, params="rounding_method")
def_elementwise(p.integer_pow_p, params="y")
def_elementwise(p.conj_p, params="input_dtype")
def_elementwise(p.stop_gradient_p, flops=arithmetic.free)
def_elementwise(p.copy_p, **_PERMUTATION, view=True, invert=axes.invert_reshape)
def_elementwise(
    p.convert_element_type_p,
    params="new_dtype weak_type",
    tests=_SHARDED,
    linear=_between_floats,
    permutes=_keeps_values,
    flops=arithmetic.free,
    widen=dtypes.widen_convert,
    invert=lambda eqn, x: x,  # nothing in a tail is narrower than float32
)

# Permutations. After ``flatten``, a reshape that permutes axes first is a transpose and a plain reshape.
def_permutation(p.reshape_p, params="new_sizes", tests={"dimensions": _none, **_SHARDED}, **_RESHAPE)
def_permutation(p.squeeze_p, params="dimensions", **_RESHAPE)
def_permutation(p.transpose_p, params="permutation", **_VIEW, squeeze=axes.transpose, invert=axes.invert_transpose)
def_permutation(
    p.broadcast_in_dim_p, params="shape broadcast_dimensions", tests=_SHARDED, **_VIEW, squeeze=axes.broadcast
)
def_permutation(p.rev_p, params="dimensions")
def_permutation(pvary_p, params="axes", squeeze=bind)

# Other linear maps that only pick, place or add entries.
def_linear(p.slice_p, params="start_indices limit_indices strides", squeeze=axes.slice_)
def_linear(p.dynamic_slice_p, params="slice_sizes", linear=in_the_first)
def_linear(p.dynamic_update_slice_p, linear=_never, joins=True)
def_linear(p.pad_p, params="padding_config", linear=_pads_with_zero)
def_linear(p.concatenate_p, params="dimension", joins=True)
def_linear(split_p, params="sizes axis")
def_linear(p.cumsum_p, params="axis reverse", flops=arithmetic.result_size)
_window = "window_dimensions window_strides padding base_dilation window_dilation"
def_linear(p.reduce_window_sum_p, params=_window, flops=arithmetic.result_size)
def_reduction(p.reduce_sum_p, linear=jointly, permutes=_same_size, widen=dtypes.widen_operands)
def_reduction(p.reduce_max_p, p.reduce_min_p, p.reduce_and_p, p.reduce_or_p)

# Contractions and lookups.
define(
    p.dot_general_p,
    params="dimension_numbers precision preferred_element_type",
    tests=_OUT_SHARDED,
    linear=in_any_one,
    contracts=True,
    flops=arithmetic.dot_general,
    flop_kind="matmul_flops",
    squeeze=axes.dot_general,
    widen=dtypes.widen_product,
)
define(
    p.conv_general_dilated_p,
    params="window_strides padding lhs_dilation rhs_dilation dimension_numbers feature_group_count batch_group_count "
    "precision preferred_element_type",
    tests=_OUT_SHARDED,
    linear=in_any_one,
    contracts=True,
    flops=arithmetic.convolution,
    flop_kind="conv_flops",
    widen=dtypes.widen_product,
)
define(
    p.gather_p,
    params="dimension_numbers slice_sizes unique_indices indices_are_sorted mode fill_value",
    tests=_OUT_SHARDED,
    linear=in_the_first,
    flops=arithmetic.free,
    squeeze=axes.gather,
    widen=dtypes.widen_operands,
)
define(
    p.scatter_add_p,
    params="update_jaxpr dimension_numbers indices_are_sorted unique_indices mode",
    tests={"update_consts": lambda consts: not consts, **_OUT_SHARDED},
    joins=True,
    cheap=True,
    flops=arithmetic.update_size,
    squeeze=axes.scatter,
    widen=dtypes.widen_scatter_add,
)

# Calls and control flow. A jit that is left in a flat Jaxpr is a sum over a loop (``passes/loops.py``).
define(
    p.jit_p,
    params="jaxpr in_shardings out_shardings in_layouts out_layouts donated_invars ctx_mesh name keep_unused inline "
    "compiler_options_kvs",
    contracts=True,
    flop_kind="matmul_flops",
)
define(p.call_p, p.closed_call_p, params="call_jaxpr")
define(p.custom_jvp_call_p, params="call_jaxpr jvp_jaxpr_fun num_consts symbolic_zeros")
define(p.custom_vjp_call_p, params="call_jaxpr fwd_jaxpr_thunk bwd num_consts out_trees symbolic_zeros")
define(p.remat_p, params="jaxpr prevent_cse differentiated policy")
define(p.scan_p, params="jaxpr length reverse unroll num_consts num_carry")
define(p.cond_p, params="branches")

# Others.
define(p.name_p, params="name", view=True, flops=arithmetic.free)
define(p.iota_p, params="dtype shape dimension", tests=_SHARDED, cheap=True, flops=arithmetic.free)
define(barrier_p)

# Opaque: counted or recognised, but no pass looks into them.
_moves = (p.bitcast_convert_type_p, p.device_put_p, p.sharding_constraint_p, p.scatter_p)
_reduces = (p.reduce_prod_p, p.reduce_xor_p, p.reduce_p, p.argmax_p, p.argmin_p, p.sort_p, p.top_k_p)
_draws = (p.random_bits_p, p.threefry2x32_p, p.rng_bit_generator_p, p.random_gamma_p, p.rng_uniform_p)
define(*_moves, opaque=True, flops=arithmetic.free)
define(*_reduces, opaque=True, flops=arithmetic.operand_size)
define(p.scatter_mul_p, p.scatter_min_p, p.scatter_max_p, opaque=True, flops=arithmetic.update_size)
define(*_draws, opaque=True, random=True)
