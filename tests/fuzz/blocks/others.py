"""Penalties, dropout, Fourier transforms, linear algebra, other dtypes."""

from typing import Any

import jax
import jax.numpy as jnp

from tests.fuzz.grammar import Context, Maker, Misfit, Shape, block


@block(chance=1.5)
def penalty(make: Maker, shape: Shape) -> Any:
    """A term of the loss that no example has a part in; or one that scales with the example's value."""
    names = list(make.scope.shareable())
    if make.depth or not names:
        raise Misfit
    chosen = make.some("of", names, 1)
    kind = make.option("kind", "squares", "sines", "gated by the value")

    def apply(context: Context, h: Any) -> Any:
        total = sum(jnp.mean(jnp.square(context.params[name]) + 0.1 * context.params[name]) for name in chosen)
        if kind == "sines":
            total = jnp.sin(total)
        elif kind == "gated by the value":
            total = total * jnp.mean(jnp.tanh(h))
        context.penalties.append(0.1 * total)
        return h

    return apply, shape


@block()
def dropout(make: Maker, shape: Shape) -> Any:
    key = make.key()
    kind = make.option("kind", "bernoulli", "noise")

    def apply(context: Context, h: Any) -> Any:
        if kind == "noise":
            return h * (1 + 0.3 * jax.random.normal(key(context), h.shape))
        return jnp.where(jax.random.bernoulli(key(context), 0.7, h.shape), h / 0.7, 0.1 * h)

    return apply, shape


@block(weights=True)
def fourier(make: Maker, shape: Shape) -> Any:
    """A learned filter of frequencies."""
    n = shape[-1]
    if make.flag("real"):
        real, imaginary = make.weight(n // 2 + 1), make.weight(n // 2 + 1)

        def apply(context: Context, h: Any) -> Any:
            spectrum = jnp.fft.rfft(h, axis=-1) * jax.lax.complex(real(context), imaginary(context))
            return jnp.fft.irfft(spectrum, n, axis=-1)
    else:
        real, imaginary = make.weight(n), make.weight(n)

        def apply(context: Context, h: Any) -> Any:
            z = jnp.fft.fft(h + 0j, axis=-1) * (real(context) + 1j * imaginary(context))
            return jnp.real(z) / n + jnp.imag(z) - 0.1 * jnp.abs(z + 0.3)

    return apply, shape


@block(weights=True)
def linear_algebra(make: Maker, shape: Shape) -> Any:
    """A system that is solved, a factorisation, a power of a matrix: with a weight that is far from singular."""
    n = shape[-1]
    w = make.weight(n, n, fan_in=4 * n)
    kind = make.option("kind", "solve", "cholesky", "triangular", "inverse", "matrix_power", "expm", "slogdet", "qr")

    def apply(context: Context, h: Any) -> Any:
        a = jnp.eye(n) * 2 + 0.5 * jnp.tanh(w(context))
        if kind == "solve":
            return jnp.linalg.solve(a, h.reshape(-1, n).T).T.reshape(h.shape)
        if kind == "cholesky":
            return h @ jnp.linalg.cholesky(a @ a.T)
        if kind == "triangular":
            y = jax.scipy.linalg.solve_triangular(jnp.tril(a), h.reshape(-1, n).T, lower=True)
            return y.T.reshape(h.shape)
        if kind == "inverse":
            return h @ jnp.linalg.inv(a)
        if kind == "matrix_power":
            return h @ jnp.linalg.matrix_power(0.4 * a, 3)
        if kind == "expm":
            return h @ jax.scipy.linalg.expm(0.2 * a)
        if kind == "slogdet":
            return h * jnp.linalg.slogdet(a)[1]
        return h @ jnp.linalg.qr(a)[0]

    return apply, shape


@block(chance=0.25)
def narrow(make: Maker, shape: Shape) -> Any:
    """A step in another dtype; the tolerance is that dtype's, so only a few programs have one."""
    if make.depth:
        raise Misfit
    dtype = make.option("dtype", "float32", "float32", "float16", "bfloat16")
    w = make.weight(shape[-1], shape[-1], fan_in=shape[-1])
    make.scope.tags.add(dtype)

    def apply(context: Context, h: Any) -> Any:
        return jnp.tanh(h.astype(dtype) @ w(context).astype(dtype)).astype(jnp.float64)

    return apply, shape
