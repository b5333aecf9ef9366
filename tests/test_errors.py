"""What is quoted of an exception: whole sentences, and not too many."""

import jax
import jax.numpy as jnp
import pytest

from pegprof.errors import LONGEST, first_line


@pytest.mark.parametrize(
    ("message", "quoted"),
    [
        ("", "ValueError"),
        ("no such axis", "ValueError: no such axis"),
        ("\n\nno such axis.\nat line 3", "ValueError: no such axis."),
        ("Out of memory.\nBuffers: many", "ValueError: Out of memory."),
        ("They differ:\n\n  * a\n  * b", "ValueError: They differ: a"),
        ("a function that must\nreturn a number.\n\nHere it is", "ValueError: a function that must return a number."),
        ("axes 1,\n2,\nand 3 are wrong\nSee also", "ValueError: axes 1, 2, and 3 are wrong"),
        ("One. " + 80 * "Two " + "end.", "ValueError: One."),
        (80 * "word ", "ValueError: " + 55 * "word " + "word ..."),
    ],
)
def test_the_first_line_is_quoted_to_the_end_of_its_sentence(message, quoted):
    assert first_line(ValueError(message)) == quoted
    assert len(quoted) <= LONGEST


def test_a_word_that_is_too_long_is_cut():
    quoted = first_line(ValueError(400 * "x"))
    assert (len(quoted) <= LONGEST, quoted[-5:]) == (True, "x ...")


def test_what_jax_says_of_trees_that_differ_is_quoted_with_the_difference():
    with pytest.raises(TypeError) as caught:
        jax.jit(lambda tree: tree).lower([jnp.ones(2)]).compile()((jnp.ones(2),))
    assert first_line(caught.value).endswith("so their Python types differ")
