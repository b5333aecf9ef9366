"""The user's own code: where its functions are, and which of its lines an error came from."""

import functools

import jax
import numpy as np
import pytest

from pegprof.user_code import home_of, line_of, place


def function(x):
    return x


class Callable:
    def __call__(self, x):
        return x

    def method(self, x):
        return x


HOME = place(__file__, function.__code__.co_firstlineno)
CALL = place(__file__, Callable.__call__.__code__.co_firstlineno)
METHOD = place(__file__, Callable.method.__code__.co_firstlineno)


@pytest.mark.parametrize(
    ("fn", "home"),
    [
        (function, HOME),
        (jax.jit(function), HOME),
        (functools.partial(function, 1), HOME),
        (jax.jit(functools.partial(jax.jit(function), 1)), HOME),
        (functools.wraps(function)(lambda x: x), HOME),
        (Callable(), CALL),
        (Callable().method, METHOD),
        (jax.jit(Callable().method), METHOD),
        (eval("lambda x: x"), ""),
        (len, ""),
    ],
)
def test_the_home_of_a_function_is_where_it_is_defined(fn, home):
    assert home_of(fn) == home


def raised_by(fn) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind
        fn()
    return caught.value


def test_the_line_of_an_error_is_the_users_own_though_it_was_raised_deeper():
    def wrong():
        return jax.numpy.dot(np.zeros(3), np.zeros(4))

    assert line_of(raised_by(wrong)) == place(__file__, wrong.__code__.co_firstlineno + 1)


def test_an_error_that_passed_through_none_of_the_users_lines_is_placed_at_home():
    error = raised_by(lambda: None + 1)
    error.__traceback__ = None
    assert line_of(error) == ""
    assert line_of(error, "home.py:3") == "home.py:3"
