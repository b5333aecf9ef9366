"""Train a byte-level language model on Python's own standard library: MicroAdam beside Adam, and two signs.

Adam divides the averaged gradient by the root of the averaged square of the batch's gradient, MicroAdam by that of the
examples' gradients: it squares before it averages. ``pegprof.train_step`` computes the statistics that an optimizer
needs, whichever it is. Run it with ``python examples/train_micro_adam.py``.
"""

import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pegprof
from pegprof import optimizers

STEPS, BATCH, CONTEXT, WIDTH = 300, 64, 8, 64

OPTIMIZERS = {  # each with a learning rate of its own
    "adam": optax.adam(1e-2),
    "micro_adam": optimizers.micro_adam(3e-2),
    "sign_ema": optimizers.sign_ema(3e-3),
    "micro_sign_sgd": optimizers.micro_sign_sgd(1e-3),
}


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "embed": 0.1 * jax.random.normal(keys[0], (256, WIDTH)),
        "in": jax.random.normal(keys[1], (CONTEXT * WIDTH, 4 * WIDTH)) / (CONTEXT * WIDTH) ** 0.5,
        "out": 0.01 * jax.random.normal(keys[2], (4 * WIDTH, 256)),
    }


def loss(params, byte_BxT1):
    """Of guessing the last byte from those before it, in nats."""
    x_BxTxD = params["embed"][byte_BxT1[:, :-1]]
    h_BxF = jax.nn.gelu(x_BxTxD.reshape(len(x_BxTxD), -1) @ params["in"])
    return optax.softmax_cross_entropy_with_integer_labels(h_BxF @ params["out"], byte_BxT1[:, -1]).mean()


def read_library():
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)


def make_batches(text, steps, seed=0):
    """Windows of the text, from random places."""
    starts = np.random.default_rng(seed).integers(len(text) - CONTEXT, size=(steps, BATCH, 1))
    return jnp.asarray(text[starts + np.arange(CONTEXT + 1)].astype(np.int32))


def train(opt, batches):
    """The loss of each batch, before the step that it leads to."""
    step, params = pegprof.train_step(loss, opt), init(jax.random.key(0))
    state, values = opt.init(params), []
    for batch in batches:
        params, state, value = step(params, state, batch)
        values.append(value)
    return np.asarray(values)


def main():
    batches = make_batches(read_library(), STEPS)
    shapes = jax.eval_shape(init, jax.random.key(0))
    for name, opt in OPTIMIZERS.items():
        values, needs = train(opt, batches), optimizers.needed_statistics(opt, shapes)
        losses = "  ".join(f"{np.mean(values[i - 50 : i]):.2f}" for i in (50, 150, STEPS))
        print(f"{name:14s}  loss {losses} nats a byte  from {', '.join(needs)}")


if __name__ == "__main__":
    main()
