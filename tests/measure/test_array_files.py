"""What one process puts into the file, another gets out of it."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pegprof.measure.worker import array_files

ARRAYS = {
    "float32": jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
    "bfloat16": jnp.linspace(0, 1, 5, dtype=jnp.bfloat16),
    "integers": jnp.array([[1], [-2]], jnp.int32),
    "booleans": jnp.array([True, False]),
    "a number": jnp.float32(7.5),
    "nothing": jnp.zeros((0, 4)),
    "random keys": jax.random.split(jax.random.key(3), 2),
    "an old key": jax.random.PRNGKey(3),
}


@pytest.fixture
def file():
    with tempfile.TemporaryFile() as opened:
        yield opened.fileno()


def _values(array):
    return np.asarray(jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array)


def test_arrays_come_out_as_they_went_in(file):
    slots = array_files.save(file, list(ARRAYS.values()))
    for array, slot in zip(ARRAYS.values(), slots, strict=True):
        loaded = array_files.load(file, slot)
        assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(_values(loaded), _values(array))


def test_what_is_saved_later_overwrites_nothing(file):
    (first,) = array_files.save(file, [jnp.arange(3)])
    array_files.save(file, [jnp.zeros(100)])
    np.testing.assert_array_equal(array_files.view(file, first), [0, 1, 2])


def test_the_first_rows_can_be_had_alone(file):
    (slot,) = array_files.save(file, [ARRAYS["random keys"]])
    loaded = array_files.load(file, slot, first=1)
    np.testing.assert_array_equal(_values(loaded), _values(ARRAYS["random keys"])[:1])
