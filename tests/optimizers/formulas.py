"""Each optimizer's formula once more, in plain NumPy, from the gradients of the examples: g_BxP of one parameter.

An oracle is a class with ``step(g_BxP) -> update``; it keeps its own averages. ``ORACLES`` has the optimizer's name,
the options to make it with and the oracle for these.
"""

import numpy as np


class Average:
    """An exponential moving average, corrected for its start at zero."""

    def __init__(self, decay):
        self.decay, self.value, self.weight = decay, 0.0, 0.0

    def add(self, x):
        self.value = self.decay * self.value + (1 - self.decay) * x
        self.weight = self.decay * self.weight + (1 - self.decay)
        return self.value / self.weight


class Adam:
    """m / (√(ReLU(v) + eps_root) + eps); ``square`` makes what v averages from g_BxP."""

    def __init__(self, square, *, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, average=lambda v: v):
        self.square, self.eps, self.eps_root, self.average = square, eps, eps_root, average
        self.m, self.v = Average(b1), Average(b2)

    def step(self, g):
        m, v = self.m.add(g.mean(axis=0)), self.average(self.v.add(self.square(g)))
        return m / (np.sqrt(np.maximum(v, 0) + self.eps_root) + self.eps)


class Signs:
    """after(average of before(g_BxP))."""

    def __init__(self, before, after, *, b1=0.9):
        self.before, self.after, self.m = before, after, Average(b1)

    def step(self, g):
        return self.after(self.m.add(self.before(g)))


def second_moment(g):
    return (g**2).mean(axis=0)


def variance(g):
    return ((g - g.mean(axis=0)) ** 2).sum(axis=0) / (len(g) - 1)


def mean_squared(g):
    return g.mean(axis=0) ** 2 - variance(g) / len(g)


def average_rows(v):
    return np.repeat(v.mean(axis=-1)[..., None], v.shape[-1], axis=-1)


def average_threes(v):
    flat = v.reshape(-1)
    blocks = [flat[i : i + 3] for i in range(0, flat.size, 3)]
    return np.concatenate([np.full(block.size, block.mean()) for block in blocks]).reshape(v.shape)


ROOT = 1e-3  # on a problem this small, an eps of 1e-8 would let micro_adam_msq run off into rounding errors


def msq(average=lambda v: v):
    return lambda: Adam(mean_squared, eps=0.0, eps_root=ROOT, average=average)


ORACLES = [
    ("micro_adam", {}, lambda: Adam(second_moment)),
    ("micro_adam", {"b1": 0.5, "b2": 0.7, "eps": 0.1}, lambda: Adam(second_moment, b1=0.5, b2=0.7, eps=0.1)),
    ("micro_adam_var", {}, lambda: Adam(variance)),
    ("micro_adam_msq", {"eps": ROOT}, msq()),
    ("micro_adam_msq", {"eps": ROOT, "block": "tensor"}, msq(lambda v: np.full_like(v, v.mean()))),
    ("micro_adam_msq", {"eps": ROOT, "block": "row"}, msq(average_rows)),
    ("micro_adam_msq", {"eps": ROOT, "block": 3}, msq(average_threes)),
    (
        "adam_mix",
        {"a": 0.3, "b": 0.6, "eps_root": 1e-6},
        lambda: Adam(lambda g: 0.3 * mean_squared(g) + 0.6 * variance(g), eps_root=1e-6),
    ),
    ("micro_sign_sgd", {}, lambda: Signs(lambda g: np.sign(g).mean(axis=0), lambda m: m)),
    ("sign_sgd", {}, lambda: Signs(lambda g: np.sign(g.mean(axis=0)), lambda m: m)),
    ("sign_ema", {}, lambda: Signs(lambda g: g.mean(axis=0), np.sign)),
    ("sign_ema", {"b1": 0.0}, lambda: Signs(lambda g: g.mean(axis=0), np.sign, b1=0.0)),
]
