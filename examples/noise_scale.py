"""Train a small model and watch the simple noise scale of its gradients: trace of the variance over |mean|².

A batch much smaller than the noise scale is mostly noise; one much larger wastes examples. Both numbers come from the
same pass as the gradient itself. Run it with ``python examples/noise_scale.py``.
"""

import jax
import jax.numpy as jnp
import optax

import pegprof

STEPS, EVERY, BATCH = 60, 10, 512


def loss(params, batch):
    h_BxH = jnp.tanh(batch["x"] @ params["in"])
    return jnp.mean((h_BxH @ params["out"] - batch["y"]) ** 2)


def make_batch(key):
    x_BxD = jax.random.normal(key, (BATCH, 8))
    return {"x": x_BxD, "y": jnp.sin(x_BxD[:, :1]) + 0.5 * x_BxD[:, 1:2] * x_BxD[:, 2:3]}


def total(tree):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))


def main():
    keys = jax.random.split(jax.random.key(0), STEPS + 2)
    params = {"in": 0.3 * jax.random.normal(keys[0], (8, 32)), "out": 0.3 * jax.random.normal(keys[1], (32, 1))}
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)
    value_and_stats = pegprof.value_and_grad_stats(loss, stats=("mean", "variance", "mean_squared"))

    @jax.jit
    def step(params, state, batch):
        value, stats = value_and_stats(params, batch)
        updates, state = optimizer.update(stats["mean"], state, params)
        params = optax.apply_updates(params, updates)
        return params, state, jnp.stack([value, total(stats["variance"]), total(stats["mean_squared"])])

    seen = []
    for i, key in enumerate(keys[2:], start=1):
        params, state, numbers = step(params, state, make_batch(key))
        seen.append(numbers)
        if i % EVERY == 0:  # one step's estimate of |mean|² can even be negative; those of some steps average out
            value, variance, mean_squared = jnp.mean(jnp.stack(seen[-EVERY:]), axis=0)
            print(f"step {i:3d}  loss {value:.3f}  noise scale {variance / mean_squared:7.1f} examples")


if __name__ == "__main__":
    main()
