"""Experts, transforms, solvers, sorting, indexing: programs that are not a stack of layers."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.registry import program, score


@program()
def mixture_of_experts_dense(draw, B):
    def loss(p, x):
        gate = jax.nn.softmax(x @ p["gate"])
        return score(jnp.einsum("bte,btd,edf->btf", gate, x, p["experts"]))

    return loss, {"gate": draw(3, 2), "experts": draw(2, 3, 4)}, draw(B, 5, 3)


@program()
def mixture_of_experts_top_k_gathered(draw, B):
    def loss(p, x):
        weight, chosen = lax.top_k(jax.nn.softmax(x @ p["gate"]), 2)
        y = jnp.einsum("btd,btkdf->btkf", x, p["experts"][chosen])
        return score(jnp.tanh(jnp.einsum("btk,btkf->btf", weight, y)))

    return loss, {"gate": draw(3, 4), "experts": draw(4, 3, 2)}, draw(B, 5, 3)


@program()
def mixture_of_experts_dispatched_with_capacity(draw, B):
    def one(p, x):  # routing within an example: two slots an expert, tokens beyond them are dropped
        probability = jax.nn.softmax(x @ p["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(probability, axis=-1), 3, dtype=x.dtype)
        slot = jnp.cumsum(chosen, axis=0) * chosen - 1
        dispatch = jax.nn.one_hot(slot.astype(jnp.int32), 2, dtype=x.dtype) * chosen[..., None]
        inputs = jnp.einsum("tes,td->esd", dispatch, x)
        outputs = jnp.tanh(jnp.einsum("esd,edf->esf", inputs, p["experts"]))
        return score(jnp.einsum("tes,esf,te->tf", dispatch, outputs, probability))

    def loss(p, x):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, x))

    return loss, {"gate": draw(4, 3), "experts": draw(3, 4, 2)}, draw(B, 5, 4)


@program()
def tokens_sorted_and_scattered(draw, B):
    def one(p, x):
        order = jnp.argsort(x @ p["key"])
        kept = x[order[:3]] @ p["W"]
        return score(jnp.zeros((5, 4), x.dtype).at[order[:3]].add(jnp.tanh(kept)) + (x @ p["key"])[:, None])

    def loss(p, x):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, x))

    return loss, {"key": draw(3), "W": draw(3, 4)}, draw(B, 5, 3)


@program()
def sort_and_top_k(draw, B):
    def loss(p, x):
        h = x @ p["W"]
        return score(jnp.sort(h, axis=-1) * p["by_rank"]) + score(lax.top_k(h, 2)[0])

    return loss, {"W": draw(3, 4), "by_rank": draw(4)}, draw(B, 3)


@program()
def sorted_parameter(draw, B):
    return lambda p, x: score(x * jnp.sort(p) + jnp.median(p)), draw(5), draw(B, 5)


@program()
def fft_filter(draw, B):
    def loss(p, x):
        return score(jnp.tanh(jnp.fft.irfft(jnp.fft.rfft(x, axis=1) * jnp.fft.rfft(p, n=6, axis=0), n=6, axis=1)))

    return loss, draw(4, 3), draw(B, 6, 3)


@program()
def spectral_weights(draw, B):
    def loss(p, x):  # a Fourier neural operator: complex weights from two real arrays
        modes = jnp.fft.rfft(x, axis=1)[:, :3]
        mixed = jnp.einsum("bmd,mde->bme", modes, lax.complex(p["re"], p["im"]))
        return score(jnp.fft.irfft(mixed, n=6, axis=1) + x @ p["skip"])

    return loss, {"re": draw(3, 2, 4), "im": draw(3, 2, 4), "skip": draw(2, 4)}, draw(B, 6, 2)


@program()
def linear_solve_with_a_parameter_matrix(draw, B):
    def loss(p, x):
        return score(jnp.linalg.solve(4 * jnp.eye(4) + p["A"], (x @ p["W"]).T))

    return loss, {"A": draw(4, 4), "W": draw(3, 4)}, draw(B, 3)


@program()
def linear_solve_for_each_example(draw, B):
    def loss(p, batch):
        matrix = 4 * jnp.eye(3) + jnp.einsum("bk,kij->bij", batch["mix"], p["basis"])
        return score(jnp.linalg.solve(matrix, batch["y"][..., None]))

    return loss, {"basis": draw(2, 3, 3, scale=0.5)}, {"mix": draw(B, 2), "y": draw(B, 3)}


@program()
def gaussian_likelihood_by_cholesky(draw, B):
    def loss(p, x):
        covariance = p["factor"] @ p["factor"].T + 0.5 * jnp.eye(3)
        L = jnp.linalg.cholesky(covariance)
        whitened = lax.linalg.triangular_solve(L, (x - p["mean"]).T, left_side=True, lower=True)
        return jnp.mean(0.5 * jnp.sum(jnp.square(whitened), axis=0)) + jnp.sum(jnp.log(jnp.diag(L)))

    return loss, {"mean": draw(3), "factor": draw(3, 2)}, draw(B, 3)


@program()
def determinant_of_a_weight(draw, B):
    def loss(p, x):  # a normalising flow
        return jnp.mean(jnp.sum(jnp.square(x @ p), axis=-1)) - jnp.linalg.slogdet(p)[1]

    return loss, draw(3, 3) + 2 * jnp.eye(3), draw(B, 3)


@program()
def dynamic_slice_by_the_example(draw, B):
    def one(p, example):
        window = lax.dynamic_slice_in_dim(p["W"], example["start"], 3)
        return score(jnp.tanh(example["x"] @ window)) * p["scale"][example["start"]]

    def loss(p, batch):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, batch))

    return loss, {"W": draw(6, 4), "scale": draw(4)}, {"x": draw(B, 5, 3), "start": draw.integers(B, below=4)}


@program()
def weight_looked_up_by_the_example(draw, B):
    def loss(p, batch):
        return score(jnp.tanh(jnp.einsum("bi,bij->bj", batch["x"], p["W"][batch["task"]]) + p["b"][batch["task"]]))

    return loss, {"W": draw(2, 3, 4), "b": draw(2, 4)}, {"x": draw(B, 3), "task": draw.integers(B, below=2)}


@program()
def graph_convolution_by_segment_sum(draw, B):
    def one(p, graph):
        messages = (graph["nodes"] @ p["W"])[graph["senders"]]
        received = jax.ops.segment_sum(messages, graph["receivers"], num_segments=4)
        return score(jnp.tanh(received + graph["nodes"] @ p["self"]))

    def loss(p, batch):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, batch))

    edges = {"senders": draw.integers(B, 6, below=4), "receivers": draw.integers(B, 6, below=4)}
    return loss, {"W": draw(3, 2), "self": draw(3, 2)}, {"nodes": draw(B, 4, 3), **edges}


@program()
def factorisation_machine(draw, B):
    def loss(p, batch):
        user, item = p["user"][batch["user"]], p["item"][batch["item"]]
        predicted = jnp.sum(user * item, axis=-1) + p["bias"][batch["item"]] + p["mean"]
        return jnp.mean(jnp.square(predicted - batch["rating"]))

    params = {"user": draw(5, 3), "item": draw(4, 3), "bias": draw(4), "mean": draw()}
    return loss, params, {"user": draw.integers(B, below=5), "item": draw.integers(B, below=4), "rating": draw(B)}


@program()
def polynomial_in_a_parameter(draw, B):
    def loss(p, x):
        powers = jnp.stack([jnp.ones_like(x), x, x**2, x**3], axis=-1)
        return jnp.mean(jnp.square(powers @ p - jnp.sin(x)))

    return loss, draw(4), draw(B)


@program()
def interpolation_of_a_grid(draw, B):
    def one(p, x):
        at = x * 5
        low = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, 4)
        return score(p[low] * (1 - at + low)[:, None] + p[low + 1] * (at - low)[:, None])

    def loss(p, x):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, x))

    return loss, draw(6, 2), draw.positive(B, 3) - 0.5


@program()
def diffusion_with_noise_in_the_batch(draw, B):
    def loss(p, batch):
        level = batch["level"][:, None]
        noisy = jnp.sqrt(1 - level) * batch["x"] + jnp.sqrt(level) * batch["noise"]
        h = jax.nn.silu(noisy @ p["in"] + jnp.cos(level * p["frequency"]) @ p["time"])
        return jnp.mean(jnp.sum(jnp.square(h @ p["out"] - batch["noise"]), axis=-1))

    params = {"in": draw(3, 4), "frequency": draw(2), "time": draw(2, 4), "out": draw(4, 3)}
    return loss, params, {"x": draw(B, 3), "noise": draw(B, 3), "level": draw.positive(B) - 0.5}


@program()
def contrastive_within_an_example(draw, B):
    def loss(p, batch):
        a, b = batch["a"] @ p["W"], batch["b"] @ p["V"]
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(jnp.einsum("bid,bjd->bij", a, b)), axis1=1, axis2=2))

    return loss, {"W": draw(3, 4, scale=0.5), "V": draw(2, 4, scale=0.5)}, {"a": draw(B, 5, 3), "b": draw(B, 5, 2)}


@program()
def connectionist_temporal_recursion(draw, B):
    def one(p, x):  # a forward algorithm in log space, with a parameter for the transitions
        emission = jax.nn.log_softmax(x @ p["W"])

        def step(alpha, e):
            return jax.nn.logsumexp(alpha[:, None] + p["transition"], axis=0) + e, None

        return -jax.nn.logsumexp(lax.scan(step, p["start"] + emission[0], emission[1:])[0])

    def loss(p, x):
        return jnp.mean(jax.vmap(one, in_axes=(None, 0))(p, x))

    return loss, {"W": draw(3, 4), "transition": draw(4, 4), "start": draw(4)}, draw(B, 5, 3)
