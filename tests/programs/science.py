"""Losses of physics and of meta-learning: derivatives and gradient steps inside the loss, and solvers of equations."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.ode import odeint

from tests.programs.registry import program, score


def _mean_of(one):
    """A loss over a batch from a loss of one example."""
    return lambda p, batch: jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, batch))


# ---- physics-informed networks: an example is a collocation point, with a point of the boundary -------------------


def _field(p, *coordinates):
    """u(t, x), a network with one number out."""
    h = jnp.tanh(jnp.stack(coordinates) @ p["W"] + p["b"])
    return jnp.tanh(h @ p["V"] + p["c"]) @ p["out"]


def _field_params(draw, coordinates):
    return {"W": draw(coordinates, 4), "b": draw(4), "V": draw(4, 5, scale=0.7), "c": draw(5), "out": draw(5)}


def _points(draw, B):
    return {"inside": draw(B, 2), "boundary": draw(B, 2), "value": draw(B)}


@program()
def burgers_equation_by_nested_gradients(draw, B):
    def residual(p, t, x):
        u_t, u_x = jax.grad(_field, argnums=(1, 2))(p["net"], t, x)
        u_xx = jax.grad(jax.grad(_field, argnums=2), argnums=2)(p["net"], t, x)
        return u_t + _field(p["net"], t, x) * u_x - jnp.exp(p["log_viscosity"]) * u_xx

    def one(p, point):
        on_the_boundary = _field(p["net"], *point["boundary"]) - point["value"]
        return jnp.square(residual(p, *point["inside"])) + 3.0 * jnp.square(on_the_boundary)

    return _mean_of(one), {"net": _field_params(draw, 2), "log_viscosity": draw()}, _points(draw, B)


@program()
def heat_equation_by_forward_derivatives(draw, B):
    def one(p, point):
        t, x = point["inside"]
        u_x = lambda x: jax.jvp(lambda x: _field(p, t, x), (x,), (jnp.ones_like(x),))[1]
        u_xx = jax.jvp(u_x, (x,), (jnp.ones_like(x),))[1]
        u_t = jax.jvp(lambda t: _field(p, t, x), (t,), (jnp.ones_like(t),))[1]
        return jnp.square(u_t - 0.3 * u_xx) + jnp.square(_field(p, *point["boundary"]) - point["value"])

    return _mean_of(one), _field_params(draw, 2), _points(draw, B)


@program()
def deep_galerkin_laplacian_forward_over_reverse(draw, B):
    def one(p, x):
        u = lambda x: _field(p["net"], *x)
        along = lambda v: jnp.vdot(v, jax.jvp(jax.grad(u), (x,), (v,))[1])
        laplacian = jnp.sum(jax.vmap(along)(jnp.eye(3, dtype=x.dtype)))
        return jnp.square(laplacian + p["wavenumber"] ** 2 * u(x) - jnp.sum(jnp.sin(x)))

    return _mean_of(one), {"net": _field_params(draw, 3), "wavenumber": draw.positive()}, draw(B, 3)


@program(keep_batch_dim=False)
def bare_hessian_of_an_energy(draw, B):
    def loss(p, x):  # Monge-Ampère: the determinant of the Hessian
        return jnp.square(jnp.linalg.det(jax.hessian(lambda x: _field(p, *x))(x)) - jnp.sum(x))

    return loss, _field_params(draw, 2), draw(B, 2)


@program()
def score_matching_by_the_trace_of_a_jacobian(draw, B):
    def one(p, x):
        model = lambda x: jnp.tanh(x @ p["W"] + p["b"]) @ p["V"]
        return jnp.trace(jax.jacfwd(model)(x)) + 0.5 * jnp.sum(jnp.square(model(x)))

    return _mean_of(one), {"W": draw(3, 4), "b": draw(4), "V": draw(4, 3)}, draw(B, 3)


@program()
def forces_and_energies(draw, B):
    def one(p, example):  # an interatomic potential: forces are minus the gradient of the energy by the positions
        def energy(r):
            distances = jnp.sqrt(jnp.sum(jnp.square(r[:, None] - r[None]), axis=-1) + 0.1)
            features = jnp.exp(-p["widths"] * jnp.square(distances[..., None] - p["centres"]))
            return jnp.sum(jnp.tanh(jnp.sum(features, axis=1) @ p["W"]) @ p["v"])

        predicted, gradient = jax.value_and_grad(energy)(example["r"])
        return jnp.square(predicted - example["energy"]) + 5.0 * jnp.mean(jnp.square(gradient + example["forces"]))

    params = {"widths": draw.positive(4), "centres": draw.positive(4), "W": draw(4, 5), "v": draw(5)}
    return _mean_of(one), params, {"r": draw(B, 3, 2), "energy": draw(B), "forces": draw(B, 3, 2)}


# ---- meta-learning: an example is a task, with its support and its query ------------------------------------------


def _regression(p, x, y):
    return jnp.mean(jnp.square(jnp.tanh(x @ p["W"] + p["b"]) @ p["V"] - y))


def _tasks(draw, B):
    return {"support": (draw(B, 2, 3), draw(B, 2, 2)), "query": (draw(B, 5, 3), draw(B, 5, 2))}


def _regression_params(draw):
    return {"W": draw(3, 4, scale=0.7), "b": draw(4), "V": draw(4, 2, scale=0.7)}


@program()
def maml_with_learned_rates(draw, B):
    def one(p, task):
        def step(net, _):
            gradient = jax.grad(_regression)(net, *task["support"])
            return jax.tree.map(lambda w, rate, g: w - jnp.exp(rate) * g, net, p["log_rate"], gradient), None

        return _regression(lax.scan(step, p["net"], length=2)[0], *task["query"])

    params = {"net": _regression_params(draw), "log_rate": {"W": draw() - 1, "b": draw(4) - 1, "V": draw() - 1}}
    return _mean_of(one), params, _tasks(draw, B)


@program()
def maml_of_first_order(draw, B):
    def one(p, task):
        gradient = lax.stop_gradient(jax.grad(_regression)(p["net"], *task["support"]))
        adapted = jax.tree.map(lambda w, g: w - p["rate"] * g, p["net"], gradient)
        return _regression(adapted, *task["query"])

    return _mean_of(one), {"net": _regression_params(draw), "rate": draw.positive()}, _tasks(draw, B)


@program()
def closed_form_adaptation_of_the_last_layer(draw, B):
    def one(p, task):  # R2-D2: ridge regression on the support's features
        features = lambda x: jnp.tanh(x @ p["W"] + p["b"])
        (x, y), h = task["support"], features(task["support"][0])
        head = h.T @ jnp.linalg.solve(h @ h.T + jnp.exp(p["log_ridge"]) * jnp.eye(2, dtype=x.dtype), y)
        return jnp.mean(jnp.square(features(task["query"][0]) @ head - task["query"][1]))

    return _mean_of(one), {"W": draw(3, 4), "b": draw(4), "log_ridge": draw()}, _tasks(draw, B)


@program()
def prototypes_of_the_support(draw, B):
    def one(p, task):
        x, label = task["support"]
        embed = lambda x: jnp.tanh(x @ p["W"]) @ p["V"]
        prototypes = jax.ops.segment_sum(embed(x), label, 2) / 2
        distances = jnp.sum(jnp.square(embed(task["query"])[:, None] - prototypes), axis=-1)
        return -jnp.mean(jax.nn.log_softmax(-distances)[:, 0])

    batch = {"support": (draw(B, 4, 3), jnp.tile(jnp.array([0, 1, 1, 0]), (B, 1))), "query": draw(B, 3, 3)}
    return _mean_of(one), {"W": draw(3, 5), "V": draw(5, 2)}, batch


# ---- neural differential equations --------------------------------------------------------------------------------


def _dynamics(p, t, y):
    return jnp.tanh(y @ p["W"] + t * p["b"]) @ p["V"]


def _dynamics_params(draw):
    return {"W": draw(3, 4, scale=0.6), "b": draw(4), "V": draw(4, 3, scale=0.6)}


def _runge_kutta(f, p, y, times):
    def step(y, span):
        t, dt = span
        k1 = f(p, t, y)
        k2 = f(p, t + dt / 2, y + dt / 2 * k1)
        k3 = f(p, t + dt / 2, y + dt / 2 * k2)
        k4 = f(p, t + dt, y + dt * k3)
        y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return y, y

    return lax.scan(step, y, (times[:-1], jnp.diff(times)))


@program()
def neural_ode_by_runge_kutta(draw, B):
    times = jnp.array([0.0, 0.3, 0.5, 0.9])

    def loss(p, y):
        return score(jnp.moveaxis(_runge_kutta(_dynamics, p, y, times)[1], 0, 1) @ p["out"])

    return loss, _dynamics_params(draw) | {"out": draw(3, 2)}, draw(B, 3)


@program()
def neural_ode_rematerialised_with_the_time_of_the_example(draw, B):
    def one(p, example):
        times = jnp.linspace(0.0, example["until"], 4)
        return score(_runge_kutta(jax.checkpoint(_dynamics), p, example["y"], times)[0])

    return _mean_of(one), _dynamics_params(draw), {"y": draw(B, 3), "until": draw.positive(B)}


@program()
def neural_ode_by_the_continuous_adjoint(draw, B):
    times = jnp.linspace(0.0, 1.0, 4)

    @jax.custom_vjp
    def solve(p, y):
        return _runge_kutta(_dynamics, p, y, times)[0]

    def forward(p, y):
        end = solve(p, y)
        return end, (p, end)

    def backward(residuals, cotangent):  # back in time: the state, its adjoint, and the gradient of the parameters
        p, end = residuals

        def augmented(p, t, state):
            y, adjoint, _ = state
            dy, vjp = jax.vjp(lambda p, y: _dynamics(p, t, y), p, y)
            dp, dadjoint = vjp(adjoint)
            return dy, -dadjoint, jax.tree.map(jnp.negative, dp)

        def step(state, span):  # the midpoint rule
            t, dt = span
            half = jax.tree.map(lambda s, d: s + dt / 2 * d, state, augmented(p, t, state))
            return jax.tree.map(lambda s, d: s + dt * d, state, augmented(p, t + dt / 2, half)), None

        start = (end, cotangent, jax.tree.map(jnp.zeros_like, p))
        (_, adjoint, gradient), _ = lax.scan(step, start, (times[:0:-1], -jnp.diff(times)[::-1]))
        return gradient, adjoint

    solve.defvjp(forward, backward)
    return lambda p, y: score(solve(p, y)), _dynamics_params(draw), draw(B, 3)


@program(keep_batch_dim=False)
def bare_neural_ode_with_adaptive_steps(draw, B):
    def loss(p, y):  # bare, since in a batch the backward solve takes steps that suit all examples together
        field = lambda y, t, p: jnp.tanh(y @ p["W"] + t * p["b"])
        return score(odeint(field, y, jnp.array([0.0, 0.7]), p, rtol=1e-4, atol=1e-4)[1])

    return loss, {"W": draw(3, 3, scale=0.6), "b": draw(3)}, draw(B, 3)


@program()
def neural_sde_with_noise_in_the_batch(draw, B):
    def loss(p, batch):
        def step(y, dw):  # Euler and Maruyama
            return y + 0.1 * _dynamics(p["drift"], 0.5, y) + jax.nn.sigmoid(y @ p["diffusion"]) * dw, None

        return score(lax.scan(step, batch["y"], jnp.moveaxis(batch["dw"], 1, 0))[0])

    params = {"drift": _dynamics_params(draw), "diffusion": draw(3, 3)}
    return loss, params, {"y": draw(B, 3), "dw": draw(B, 5, 3, scale=0.3)}
