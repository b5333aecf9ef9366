"""Implicit layers: fixed points, roots and linear systems, differentiated by the implicit function theorem."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_factor, cho_solve
from jax.scipy.sparse.linalg import cg

from tests.programs.registry import program, score


def _mean_of(one):
    """A loss over a batch from a loss of one example."""
    return lambda p, batch: jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, batch))


def _iterate(fun, start):
    """The fixed point of a contraction, as many steps as it takes."""

    def further(state):
        step, before, now = state
        return (step < 80) & (jnp.max(jnp.abs(before - now)) > 1e-14)

    return lax.while_loop(further, lambda state: (state[0] + 1, state[2], fun(state[2])), (0, start + 1, start))[2]


@program()
def deep_equilibrium_with_loops_both_ways(draw, B):
    def cell(p, x, z):
        return jnp.tanh(0.3 * z @ p["W"] + x @ p["U"] + p["b"])

    @jax.custom_vjp
    def solve(p, x):
        return _iterate(lambda z: cell(p, x, z), jnp.zeros(4, x.dtype))

    def forward(p, x):
        z = solve(p, x)
        return z, (p, x, z)

    def backward(residuals, cotangent):  # u = cotangent + uᵀ ∂cell/∂z, again a fixed point
        p, x, z = residuals
        _, vjp_z = jax.vjp(lambda z: cell(p, x, z), z)
        adjoint = _iterate(lambda u: cotangent + vjp_z(u)[0], cotangent)
        return jax.vjp(lambda p, x: cell(p, x, z), p, x)[1](adjoint)

    solve.defvjp(forward, backward)
    params = {"cell": {"W": draw(4, 4, scale=0.7), "U": draw(3, 4), "b": draw(4)}, "embed": draw(5, 3)}
    return _mean_of(lambda p, x: score(solve(p["cell"], x @ p["embed"]))), params, draw(B, 5)


@program()
def deep_equilibrium_with_a_linear_solve(draw, B):
    def cell(p, x, z):
        return jnp.tanh(0.3 * p["W"] @ z + p["U"] @ x)

    @jax.custom_vjp
    def solve(p, x):
        return lax.fori_loop(0, 40, lambda _, z: cell(p, x, z), jnp.zeros(4, x.dtype))

    def backward(residuals, cotangent):
        p, x, z = residuals
        jacobian = jax.jacobian(cell, argnums=2)(p, x, z)
        adjoint = jnp.linalg.solve(jnp.eye(4, dtype=x.dtype) - jacobian.T, cotangent)
        return jax.vjp(lambda p, x: cell(p, x, z), p, x)[1](adjoint)

    solve.defvjp(lambda p, x: (z := solve(p, x), (p, x, z)), backward)
    return _mean_of(lambda p, x: score(solve(p, x))), {"W": draw(4, 4, scale=0.7), "U": draw(4, 3)}, draw(B, 3)


@program()
def root_by_newton(draw, B):
    def one(p, x):
        def residual(z):
            return z + 0.3 * jnp.sin(p["W"] @ z) - p["U"] @ x

        def newton(residual, z):
            step = lambda _, z: z - jnp.linalg.solve(jax.jacobian(residual)(z), residual(z))
            return lax.fori_loop(0, 8, step, z)

        def tangent_solve(linear, y):
            return jnp.linalg.solve(jax.jacobian(linear)(y), y)

        return score(lax.custom_root(residual, jnp.zeros(3, x.dtype), newton, tangent_solve))

    return _mean_of(one), {"W": draw(3, 3), "U": draw(3, 4)}, draw(B, 4)


@program()
def scalar_root_by_bisection(draw, B):
    def one(p, x):  # the quantile of a mixture of logistic distributions
        def residual(q):
            return jnp.vdot(jax.nn.softmax(p["weights"]), jax.nn.sigmoid((q - p["means"]) * jnp.exp(p["scales"]))) - x

        def bisect(residual, _):
            def halve(_, ends):
                middle = jnp.mean(ends)
                low = residual(middle) < 0
                return jnp.where(low, jnp.stack([middle, ends[1]]), jnp.stack([ends[0], middle]))

            return jnp.mean(lax.fori_loop(0, 60, halve, jnp.array([-20.0, 20.0], x.dtype)))

        return score(lax.custom_root(residual, jnp.zeros((), x.dtype), bisect, lambda g, y: y / g(jnp.ones_like(y))))

    return _mean_of(one), {"weights": draw(3), "means": draw(3), "scales": draw(3)}, jax.nn.sigmoid(draw(B))


def _definite(W):
    return W @ W.T + 2.0 * jnp.eye(W.shape[0], dtype=W.dtype)


@program()
def conjugate_gradients_with_a_matrix_of_parameters(draw, B):
    def one(p, x):
        return score(cg(lambda v: _definite(p["W"]) @ v, jnp.tanh(x @ p["in"]), tol=1e-13)[0])

    return _mean_of(one), {"W": draw(4, 2), "in": draw(3, 4)}, draw(B, 3)


@program()
def conjugate_gradients_with_a_matrix_of_the_example(draw, B):
    def one(p, x):  # graph diffusion: (I + c L) z = features
        weights = jnp.exp(-jnp.square(x @ p["key"] - (x @ p["key"]).T))
        smooth = lambda z: z + jnp.exp(p["log_c"]) * (jnp.sum(weights, axis=1)[:, None] * z - weights @ z)
        return score(cg(smooth, x @ p["W"], tol=1e-13)[0])

    return _mean_of(one), {"key": draw(3, 1), "log_c": draw(), "W": draw(3, 2)}, draw(B, 4, 3)


@program()
def custom_linear_solve_by_jacobi_iterations(draw, B):
    def one(p, x):
        A = 0.2 * p["A"] + 3.0 * jnp.eye(4, dtype=x.dtype)

        def jacobi(matvec, b):
            return lax.fori_loop(0, 60, lambda _, z: z + (b - matvec(z)) / 3.0, jnp.zeros_like(b))

        return score(lax.custom_linear_solve(lambda v: A @ v, x @ p["in"], jacobi, transpose_solve=jacobi))

    return _mean_of(one), {"A": draw(4, 4), "in": draw(3, 4)}, draw(B, 3)


@program()
def gaussian_process_by_cholesky(draw, B):
    def one(p, example):
        x, y = example["x"] @ p["embed"], example["y"]
        distances = jnp.sum(jnp.square(x[:, None] - x[None]), axis=-1)
        K = jnp.exp(p["log_scale"] - distances) + jnp.exp(p["log_noise"]) * jnp.eye(4, dtype=x.dtype)
        factor = cho_factor(K, lower=True)
        return 0.5 * jnp.vdot(y, cho_solve(factor, y)) + jnp.sum(jnp.log(jnp.diagonal(factor[0])))

    params = {"embed": draw(3, 2), "log_scale": draw(), "log_noise": draw()}
    return _mean_of(one), params, {"x": draw(B, 4, 3), "y": draw(B, 4)}


@program()
def quadratic_program_with_equalities(draw, B):
    def one(p, x):  # OptNet: minimise zᵀQz/2 - qᵀz subject to Az = b, by its optimality conditions
        Q, A = _definite(p["Q"]), p["A"]
        system = jnp.block([[Q, A.T], [A, jnp.zeros((2, 2), x.dtype)]])
        z = jnp.linalg.solve(system, jnp.concatenate([jnp.tanh(x @ p["q"]), p["b"]]))[:4]
        return score(z)

    return _mean_of(one), {"Q": draw(4, 3), "A": draw(2, 4), "q": draw(3, 4), "b": draw(2)}, draw(B, 3)


@program()
def optimal_transport_by_sinkhorn(draw, B):
    def one(p, example):
        embed = lambda x: jnp.tanh(x @ p["W"])
        cost = jnp.sum(jnp.square(embed(example["from"])[:, None] - embed(example["to"])[None]), axis=-1)

        def step(g, _):
            f = -jax.nn.logsumexp(g[None] - cost, axis=1)
            return -jax.nn.logsumexp(f[:, None] - cost, axis=0), f

        g, f = lax.scan(step, jnp.zeros(4, cost.dtype), length=5)
        return jnp.sum(jnp.exp(f[-1][:, None] + g[None] - cost) * cost)

    return _mean_of(one), {"W": draw(3, 2)}, {"from": draw(B, 5, 3), "to": draw(B, 4, 3)}
