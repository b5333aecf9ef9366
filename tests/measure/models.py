"""Small models that misbehave, each in one way, as a user's file would hold them."""

import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from pegprof.models.problem import Problem

print("a user's file may print when it is imported")  # noqa: T201


def _problem(name, loss):
    return Problem(
        name=name,
        init=lambda key: {"w": jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)},
        loss=loss,
        batch=lambda key, B: jax.random.normal(key, (B, 4)),
    )


def _mean_loss(params, x_BxI):
    return jnp.mean(jnp.tanh(x_BxI @ params["w"] + params["b"]) ** 2)


def fine():
    return _problem("fine", _mean_loss)


def huge():
    """Parameters and gradient, twice 64 GiB: more than any TPU of today has."""
    return Problem(
        name="huge",
        init=lambda key: jnp.zeros((2**17, 2**17)),
        loss=lambda w, x_BxI: jnp.mean(jnp.tanh(x_BxI @ w) ** 2),
        batch=lambda key, B: jnp.ones((B, 2**17)),
    )


def prints_at_every_trace():
    def loss(params, x_BxI):
        print("tracing", x_BxI.shape)  # noqa: T201
        return _mean_loss(params, x_BxI)

    return _problem("prints", loss)


def _when_alone(action):
    """A loss that does something to any method that shows it one example."""

    def loss(params, x_BxI):
        if x_BxI.shape[0] == 1:
            action()
        return _mean_loss(params, x_BxI)

    return loss


def _raise():
    raise ValueError("no batches of one, please")


def raises_when_alone():
    return _problem("raises", _when_alone(_raise))


def dies_when_alone():
    return _problem("dies", _when_alone(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def interacting_examples():
    def loss(params, x_BxI):
        return _mean_loss(params, x_BxI / jnp.sqrt(1.0 + jnp.mean(x_BxI**2, axis=0, keepdims=True)))

    return _problem("interacting", loss)


def not_a_scalar():
    return _problem("vector", lambda params, x_BxI: jnp.mean(x_BxI @ params["w"], axis=0))


def raises():
    def loss(params, x_BxI):
        raise RuntimeError("this loss never works")

    return _problem("broken", loss)


def dies_when_run_alone(marker: str, after: int):
    """Compiles; but after so many runs of examples on their own, the process is killed."""

    def count_or_die():
        with Path(marker).open("ab") as file:
            file.write(b".")
        if Path(marker).stat().st_size > after:
            os.kill(os.getpid(), signal.SIGKILL)

    return _problem("dies running", _when_alone(lambda: jax.debug.callback(count_or_die)))


def never_traced_beyond(most: int):
    """With more examples at once than that, tracing takes an hour."""

    def loss(params, x_BxI):
        if x_BxI.shape[0] > most:
            time.sleep(3600)
        return _mean_loss(params, x_BxI)

    return _problem("never traced", loss)


def sleeps(seconds: float = 60.0):
    """Takes its time, whatever method runs it."""

    def loss(params, x_BxI):
        jax.debug.callback(lambda: time.sleep(seconds))
        return _mean_loss(params, x_BxI)

    return _problem("sleeps", loss)


def twins(spec: str = "fsdp"):
    """Two matrices of one shape, of which one is sharded and the other is not."""

    def sharding(params, mesh):
        return {"down": jax.P(spec or mesh.shape["tensor"]), "up": jax.P()}

    return Problem(
        name="twins",
        init=lambda key: {"down": jax.random.normal(key, (64, 64)), "up": jax.random.normal(key, (64, 64))},
        loss=lambda params, x: jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"]),
        batch=lambda key, B: jax.random.normal(key, (B, 64)),
        sharding=sharding,
    )
