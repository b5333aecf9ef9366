"""One small model in linen, in NNX and in plain JAX: the engine does not care which.

The three name their parameters alike, so that one pytree serves all.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from pegprof import grad_stats, make_plan
from tests.engine.cases import ALL_STATISTICS
from tests.oracles import assert_stats_agree, loop_stats, quick_jit

V, D, F, T, B = 11, 4, 6, 5, 3

pytestmark = pytest.mark.usefixtures("x64")


class Linen(nn.Module):
    @nn.compact
    def __call__(self, token_BxT):
        embed = nn.Embed(V, D, name="embed")
        x_BxTxD = embed(token_BxT)
        h_BxTxF = nn.gelu(nn.Dense(F, name="up")(nn.LayerNorm(name="norm")(x_BxTxD)))
        return embed.attend(x_BxTxD + nn.Dense(D, name="down")(h_BxTxF))


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, dtype=jnp.float64, rngs=rngs)
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.down = nnx.Linear(F, D, rngs=rngs)

    def __call__(self, token_BxT):
        x_BxTxD = self.embed(token_BxT)
        return self.embed.attend(x_BxTxD + self.down(nnx.gelu(self.up(self.norm(x_BxTxD)))))


def plain(params, token_BxT):
    x_BxTxD = params["embed"]["embedding"][token_BxT]
    mean, var = jnp.mean(x_BxTxD, -1, keepdims=True), jnp.var(x_BxTxD, -1, keepdims=True)
    y_BxTxD = (x_BxTxD - mean) / jnp.sqrt(var + 1e-6) * params["norm"]["scale"] + params["norm"]["bias"]
    h_BxTxF = jax.nn.gelu(y_BxTxD @ params["up"]["kernel"] + params["up"]["bias"])
    return (x_BxTxD + h_BxTxF @ params["down"]["kernel"] + params["down"]["bias"]) @ params["embed"]["embedding"].T


def nnx_logits(params, token_BxT):
    model = nnx.eval_shape(lambda: NNX(nnx.Rngs(0)))
    nnx.update(model, params)
    return model(token_BxT)


FORMS = {
    "linen": lambda params, token_BxT: Linen().apply({"params": params}, token_BxT),
    "nnx": nnx_logits,
    "plain": plain,
}


def loss_of(logits):
    def loss(params, token_BxT):
        return -jnp.mean(jax.nn.log_softmax(logits(params, token_BxT))[..., 0])

    return loss


def case():
    shapes = jax.eval_shape(lambda: Linen().init(jax.random.key(0), jnp.zeros(T, int))["params"])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), shapes)
    return params, jnp.asarray(rng.integers(0, V, size=(B, T)))


@pytest.mark.parametrize("keep_batch_dim", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_statistics_of_the_plain_one(form, keep_batch_dim):
    params, batch = case()
    expected = loop_stats(loss_of(plain), ALL_STATISTICS, params, batch, keep_batch_dim=keep_batch_dim)
    fn = grad_stats(loss_of(FORMS[form]), ALL_STATISTICS, keep_batch_dim=keep_batch_dim)
    assert_stats_agree(quick_jit(fn)(params, batch), expected)


def test_every_form_gets_the_same_plan():
    params, batch = case()
    plans = [make_plan(loss_of(logits), params, batch, backend="cpu") for logits in FORMS.values()]
    no_bytes = dict(bytes_moved=0, candidates=())  # ids of tokens are wider in some forms
    plain, *others = [[dataclasses.replace(row, **no_bytes) for row in plan.rows] for plan in plans]
    assert all(rows == plain for rows in others)


def test_the_state_of_an_nnx_module_gets_statistics_of_its_own_structure():
    _, batch = case()
    graph, state = nnx.split(NNX(nnx.Rngs(0)))

    def loss(state, token_BxT):
        return loss_of(lambda state, token_BxT: nnx.merge(graph, state)(token_BxT))(state, token_BxT)

    actual = quick_jit(grad_stats(loss, ("mean", "norm")))(state, batch)
    assert jax.tree.structure(actual["mean"]) == jax.tree.structure(state)
    assert_stats_agree(actual, loop_stats(loss, ("mean", "norm"), state, batch), rtol=1e-5)
