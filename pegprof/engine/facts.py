"""What the engine knows of each primitive's parameters.

A pass may look into an equation only if it understands all of its parameters. ``known(eqn)`` gives the primitive of
such an equation, and None for any other: one with a parameter that is not listed here, or with a value that no rule
handles, such as a sharding. Every pass then treats the equation as a black box, which is right and slower.

One line registers a family: its primitives, the parameters that may have any value, and those whose value must pass a
test.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pegprof.engine.jaxpr import JaxprEqn, Primitive, barrier_p, pvary_p, split_p
from pegprof.engine.jaxpr import primitives as p

Test = Callable[[Any], bool]

_UNDERSTOOD: dict[Primitive, Mapping[str, Test]] = {}


def known(eqn: JaxprEqn) -> Primitive | None:
    """The equation's primitive if all its parameters are understood, else None."""
    understood = _UNDERSTOOD.get(eqn.primitive)
    if understood is None:
        return None
    fits = all(name in understood and understood[name](value) for name, value in eqn.params.items())
    return eqn.primitive if fits else None


def known_primitives() -> tuple[Primitive, ...]:
    """The primitives that some pass may look into."""
    return tuple(_UNDERSTOOD)


def _understand(primitives: Iterable[Primitive], names: str = "", **tests: Test) -> None:
    """Register primitives: ``names`` are parameters of any value, ``tests`` say which values of others will do."""
    for primitive in primitives:
        _UNDERSTOOD[primitive] = {**dict.fromkeys(names.split(), _any), **tests}


def _any(value: Any) -> bool:
    return True


def _none(value: Any) -> bool:
    return value is None


def _unsharded(sharding: Any) -> bool:
    """Whether a sharding spreads nothing: JAX gives some equations one over an empty mesh, or over none of its axes."""
    return sharding is None or sharding.mesh.empty or all(axis is None for axis in sharding.spec)


# Elementwise.
_understand((p.add_p, p.add_jaxvals_p, p.sub_p, p.div_p, p.neg_p, p.max_p, p.min_p, p.pow_p, p.rem_p))
_understand((p.abs_p, p.square_p, p.sign_p, p.floor_p, p.ceil_p, p.erf_p, p.erfc_p, p.erf_inv_p, p.is_finite_p))
_understand((p.exp_p, p.exp2_p, p.expm1_p, p.log_p, p.log1p_p, p.sqrt_p, p.rsqrt_p, p.cbrt_p), "accuracy")
_understand((p.sin_p, p.cos_p, p.tan_p, p.tanh_p, p.logistic_p), "accuracy")
_understand((p.eq_p, p.ne_p, p.lt_p, p.le_p, p.gt_p, p.ge_p, p.and_p, p.or_p, p.xor_p, p.not_p))
_understand((p.select_n_p, p.clamp_p, p.stop_gradient_p, p.copy_p, p.real_p, p.imag_p, p.complex_p))
_understand((p.mul_p,), out_dtype=_none)
_understand((p.round_p,), "rounding_method")
_understand((p.integer_pow_p,), "y")
_understand((p.conj_p,), "input_dtype")
_understand((p.convert_element_type_p,), "new_dtype weak_type", sharding=_unsharded)

# Moving entries. A reshape that permutes axes first is a transpose and a plain reshape after ``flatten``.
_understand((p.reshape_p,), "new_sizes", dimensions=_none, sharding=_unsharded)
_understand((p.squeeze_p, p.rev_p), "dimensions")
_understand((p.broadcast_in_dim_p,), "shape broadcast_dimensions", sharding=_unsharded)
_understand((p.transpose_p,), "permutation")
_understand((p.slice_p,), "start_indices limit_indices strides")
_understand((p.dynamic_slice_p,), "slice_sizes")
_understand((p.dynamic_update_slice_p, barrier_p))
_understand((p.pad_p,), "padding_config")
_understand((p.concatenate_p,), "dimension")
_understand((split_p,), "sizes axis")
_understand((pvary_p,), "axes")
_understand((p.iota_p,), "dtype shape dimension", sharding=_unsharded)

# Sums, products and lookups.
_understand((p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p), "axes", out_sharding=_unsharded)
_understand((p.reduce_and_p, p.reduce_or_p), "axes", out_sharding=_unsharded)
_understand((p.cumsum_p,), "axis reverse")
_understand((p.reduce_window_sum_p,), "window_dimensions window_strides padding base_dilation window_dilation")
_understand((p.dot_general_p,), "dimension_numbers precision preferred_element_type", out_sharding=_unsharded)
_understand(
    (p.conv_general_dilated_p,),
    "window_strides padding lhs_dilation rhs_dilation dimension_numbers feature_group_count batch_group_count "
    "precision preferred_element_type",
    out_sharding=_unsharded,
)
_understand(
    (p.gather_p,),
    "dimension_numbers slice_sizes unique_indices indices_are_sorted mode fill_value",
    out_sharding=_unsharded,
)
_understand(
    (p.scatter_add_p,),
    "update_jaxpr dimension_numbers indices_are_sorted unique_indices mode",
    update_consts=lambda consts: not consts,
    out_sharding=_unsharded,
)

# Calls and control flow.
_understand(
    (p.jit_p,),
    "jaxpr in_shardings out_shardings in_layouts out_layouts donated_invars ctx_mesh name keep_unused inline "
    "compiler_options_kvs",
)
_understand((p.call_p, p.closed_call_p), "call_jaxpr")
_understand((p.custom_jvp_call_p,), "call_jaxpr jvp_jaxpr_fun num_consts symbolic_zeros")
_understand((p.custom_vjp_call_p,), "call_jaxpr fwd_jaxpr_thunk bwd num_consts out_trees symbolic_zeros")
_understand((p.remat_p,), "jaxpr prevent_cse differentiated policy")
_understand((p.name_p,), "name")
_understand((p.scan_p,), "jaxpr length reverse unroll num_consts num_carry")
_understand((p.cond_p,), "branches")
