"""patches and depthwise, each alone: right for every convolution, and used."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pegprof.engine.plan import Plan
from pegprof.engine.planner import make_plan
from pegprof.engine.run import grad_stats
from pegprof.engine.statistics import resolve
from tests.engine.cases import case, defined_for, only, tolerance, truth
from tests.oracles import assert_stats_agree, quick_jit
from tests.programs import PROGRAMS, convolutions
from tests.programs.registry import Draw, score

B = 3
WITH_NO_CONVOLUTION = {"patches_by_reshape", "kernel_made_by_the_example"}
CONVOLUTIONS = sorted(name for name in PROGRAMS if hasattr(convolutions, name) and name not in WITH_NO_CONVOLUTION)
DEPTHWISE = ["convolution_2d_depthwise", "convolution_1d_depthwise_causal", "separable_convolution"]


def _kernels(plan: Plan) -> list[str]:
    return [row.strategy for row in plan.rows if "taps" in row.contraction]


@pytest.mark.parametrize(
    ("rule", "name"), [("patches", n) for n in CONVOLUTIONS] + [("depthwise", n) for n in DEPTHWISE]
)
def test_a_rule_alone_gives_every_statistic_of_every_convolution(x64, monkeypatch, rule: str, name: str) -> None:
    only(monkeypatch, rule)
    loss, params, batch = case(name, B)
    stats = defined_for(B)
    used = _kernels(make_plan(loss, params, batch, stats=stats))
    assert rule in used
    assert rule == "depthwise" or set(used) == {"patches"}
    found = quick_jit(grad_stats(loss, stats))(params, batch)
    assert_stats_agree(found, truth(name, B), tolerance(PROGRAMS[name]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A convolution with every number that lax takes, an entry for each axis of space as the kernel has them."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    layout: tuple[str, str, str]
    groups: int
    groups_of: str  # "feature" or "batch"
    n: int  # channels in, of a group
    o: int  # channels out, of a group

    def has_room(self) -> bool:
        axes = zip(self.image, self.kernel, self.lhs_dilation, self.rhs_dilation, self.padding, strict=True)
        return all((v - 1) * e + 1 + low + high >= (k - 1) * d + 1 for v, k, e, d, (low, high) in axes)

    def loss(self, w: jax.Array, x: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(
            x,
            w,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            dimension_numbers=self.layout,
            **{f"{self.groups_of}_group_count": self.groups},
        )
        return score(jnp.tanh(y))

    def draw(self, draw: Draw) -> tuple[jax.Array, jax.Array]:
        """A kernel, and B examples, each with an axis of images of its own."""
        by_batch = self.groups_of == "batch"
        space = [a for a in self.layout[1] if a in "DHW"]
        x = {"N": self.groups if by_batch else 1, "C": self.n if by_batch else self.n * self.groups}
        w = {"I": self.n, "O": self.o * self.groups}
        x |= zip(space, self.image, strict=True)
        w |= zip(space, self.kernel, strict=True)
        return draw(*(w[a] for a in self.layout[1]), scale=0.3), draw(B, *(x[a] for a in self.layout[0]))


LAYOUTS = {
    1: [("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"), ("WNC", "IWO", "CWN")],
    2: [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("HNCW", "WOHI", "NWCH"), ("NHWC", "HIWO", "NCHW")],
    3: [("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW"), ("CDNHW", "WDIHO", "NDHCW")],
}


def _drawn_layer(seed: int) -> Layer:
    """A layer whose kernel has at least one place in its image."""
    rng = np.random.default_rng(seed)
    ndim = 1 + seed % 3

    def pick(low: int, high: int, odds: float = 1.0) -> tuple[int, ...]:
        return tuple(rng.integers(low, high, ndim).tolist()) if rng.random() < odds else (1,) * ndim

    while True:
        layer = Layer(
            image=pick(3, 8 if ndim < 3 else 6),
            kernel=pick(1, 4),
            strides=pick(1, 4, odds=0.7),
            lhs_dilation=pick(1, 4, odds=0.4),
            rhs_dilation=pick(1, 4, odds=0.4),
            padding=tuple(zip(pick(-2, 4), pick(-2, 4), strict=True)),
            layout=LAYOUTS[ndim][seed // 3 % len(LAYOUTS[ndim])],
            groups=int(rng.integers(1, 4)),
            groups_of="batch" if rng.random() < 0.3 else "feature",
            n=int(rng.integers(1, 4)),
            o=int(rng.integers(1, 4)),
        )
        if layer.has_room():
            return layer


def _assert_agrees_with_vmap(layer: Layer, rule: str, seed: int) -> None:
    kernel, batch = layer.draw(Draw(jax.random.key(seed)))
    names = ("mean", "second_moment", "variance", "norm")
    plan = make_plan(layer.loss, kernel, batch, stats=names, keep_batch_dim=False)
    assert _kernels(plan) == [rule]

    def both(kernel: jax.Array, batch: jax.Array) -> Any:
        found = grad_stats(layer.loss, names, keep_batch_dim=False, plan=plan)(kernel, batch)
        return found, jax.vmap(jax.grad(layer.loss), in_axes=(None, 0))(kernel, batch)

    found, g_Bx = quick_jit(both)(kernel, batch)
    for stat in resolve(names):
        want = stat.oracle(np.asarray(g_Bx))
        np.testing.assert_allclose(found[stat.name], want, rtol=1e-8, atol=1e-10 * np.max(np.abs(want), initial=0))


@pytest.mark.parametrize("seed", range(48))
def test_any_layer_by_patches(x64, no_rank_promotion, monkeypatch, seed: int) -> None:
    only(monkeypatch, "patches")
    _assert_agrees_with_vmap(_drawn_layer(seed), "patches", seed)


@pytest.mark.parametrize("seed", range(24))
def test_any_depthwise_layer_by_shifts(x64, no_rank_promotion, monkeypatch, seed: int) -> None:
    only(monkeypatch, "depthwise")
    layer = dataclasses.replace(_drawn_layer(seed), groups=2 + seed % 2, n=1, o=1)
    _assert_agrees_with_vmap(layer, "depthwise", seed)


def _layer(**changed: Any) -> Layer:
    plain = Layer(
        image=(9, 8),
        kernel=(3, 2),
        strides=(1, 1),
        lhs_dilation=(1, 1),
        rhs_dilation=(1, 1),
        padding=((1, 1), (0, 1)),
        layout=LAYOUTS[2][0],
        groups=1,
        groups_of="feature",
        n=2,
        o=3,
    )
    return dataclasses.replace(plain, **changed)


@pytest.mark.parametrize(
    "layer",
    [
        _layer(n=5, o=1),  # the cotangent is shifted
        _layer(n=5, o=1, layout=LAYOUTS[2][1]),
        _layer(n=4, o=1, groups=2, padding=((-1, 3), (4, -2))),
        _layer(strides=(3, 3)),  # patches that do not overlap
        _layer(strides=(4, 2), layout=LAYOUTS[2][1], padding=((0, 0), (2, 2))),
        _layer(image=(40, 3), kernel=(35, 3), padding=((0, 0), (0, 0))),  # more taps than slices are made for
        _layer(image=(40, 3), kernel=(35, 3), n=4, o=1),
        _layer(kernel=(9, 8), padding=((0, 0), (0, 0))),  # a kernel as large as the image
        _layer(padding=((-8, 9), (5, -4))),  # nothing of the image left but its edge
    ],
)
def test_layers_that_take_another_way(x64, no_rank_promotion, monkeypatch, layer: Layer) -> None:
    only(monkeypatch, "patches")
    _assert_agrees_with_vmap(layer, "patches", seed=0)


@pytest.mark.parametrize(("rule", "groups"), [("patches", 1), ("patches", 2), ("depthwise", 2)])
def test_products_of_bfloat16_are_added_up_in_float32(monkeypatch, rule: str, groups: int) -> None:
    only(monkeypatch, rule)
    layer = _layer(groups=groups, n=1, o=1) if rule == "depthwise" else _layer(groups=groups)
    kernel, batch = (x.astype(jnp.bfloat16) for x in layer.draw(Draw(jax.random.key(0))))
    found = quick_jit(grad_stats(layer.loss, "second_moment", keep_batch_dim=False))(kernel, batch)["second_moment"]
    assert found.dtype == jnp.float32
    # The cotangent is rounded to bfloat16, the products are not: the entries are no multiples of bfloat16's.
    assert np.any(np.asarray(found.astype(jnp.bfloat16), np.float32) != np.asarray(found))
    g_Bx = jax.vmap(jax.grad(layer.loss), in_axes=(None, 0))(kernel, batch).astype(jnp.float32)
    np.testing.assert_allclose(found, jnp.mean(jnp.square(g_Bx), axis=0), rtol=0.03, atol=0.01 * float(jnp.max(found)))


def test_the_planner_takes_them_on_a_cpu() -> None:
    dense = _layer(image=(16, 16), kernel=(3, 3), n=32, o=64)
    depthwise = _layer(image=(16, 16), kernel=(3, 3), n=1, o=1, groups=64)
    for layer, rule in ((dense, "patches"), (depthwise, "depthwise")):
        kernel, batch = layer.draw(Draw(jax.random.key(0)))
        assert _kernels(make_plan(layer.loss, kernel, batch, keep_batch_dim=False, backend="cpu")) == [rule]
