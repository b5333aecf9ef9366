"""The search for the largest batch, on devices that are formulas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegprof.measure.batch_search import Edge, Try, find_edge


def search(needs, *, capacity=1000, starts=(64,), step=1, most=4096, tells=True, at_most=None):
    """The edge, and the batches that it took to find it."""
    tried = []

    def attempt(batch):
        if at_most is not None and len(tried) == at_most:
            return None
        tried.append(batch)
        fits = needs(batch) <= capacity
        return Try(fits=fits, needs_bytes=needs(batch) if fits or tells else None)

    return find_edge(attempt, capacity_bytes=capacity, starts=starts, step=step, most=most), tried


def exact(largest, refused):
    return Edge(largest=largest, refused=refused, is_exact=True)


def test_on_a_line_it_takes_few_tries():
    edge, tried = search(lambda batch: 100 + 20 * batch)
    assert edge == exact(45, 46)
    assert len(tried) <= 5


def test_a_compiler_that_squeezes_near_the_edge_compiles_only_once():
    """Beyond the edge needs are what is left after squeezing; below it they hug the capacity."""
    edge, tried = search(lambda batch: 20 * batch - 30 if batch > 51 else min(990, 30 * batch))
    assert edge == exact(51, 52)
    assert [batch for batch in tried if batch <= edge.largest] == [51]


def test_where_the_line_is_wrong_the_rest_is_halved_from_above():
    """As a TPU's compiler has been seen to: what it says of refused batches foretells too little."""
    needs = {64: 1240, 52: 1066, 51: 1050, 50: 1030, 49: 1010}
    edge, tried = search(lambda batch: needs.get(batch, 1200 if batch > 48 else 920), capacity=1000)
    assert edge == exact(48, 49)
    assert [batch for batch in tried if batch <= 48] == [48]


def test_what_hardly_grows_has_no_limit_up_to_the_most():
    edge, tried = search(lambda batch: 500, starts=(64, 4096))
    assert edge == exact(4096, None)
    assert tried == [64, 4096]


def test_what_never_fits_has_no_largest():
    edge, _ = search(lambda batch: 5000 + batch)
    assert edge == exact(None, 1)


def test_nothing_below_the_least_is_tried():
    edge, tried = find_edge_from(2)
    assert edge == exact(None, 2)
    assert min(tried) == 2


def find_edge_from(least):
    tried = []

    def attempt(batch):
        tried.append(batch)
        return Try(fits=False, needs_bytes=5000 + batch)

    return find_edge(attempt, capacity_bytes=1000, starts=(64,), step=1, least=least, most=4096), tried


def test_only_multiples_of_the_step_are_tried():
    edge, tried = search(lambda batch: 20 * batch, step=16)
    assert edge == exact(48, 64)
    assert all(batch % 16 == 0 for batch in tried)


def test_when_time_is_up_the_edge_is_between_two():
    edge, tried = search(lambda batch: 20 * batch, at_most=1)
    assert edge == Edge(largest=None, refused=64, is_exact=False)
    assert tried == [64]


@given(
    limit=st.integers(0, 300),
    start=st.integers(1, 200),
    step=st.integers(1, 7),
    tells=st.booleans(),
    wobble=st.lists(st.integers(0, 40), min_size=1),
)
def test_the_answer_is_right_wherever_the_edge_is_and_whatever_the_needs_say(limit, start, step, tells, wobble):
    def needs(batch):
        extra = wobble[batch % len(wobble)]
        return 1000 - min(999, extra) if batch <= limit else 1001 + 3 * (batch - limit) + extra

    edge, tried = search(needs, starts=(start,), step=step, most=256, tells=tells)
    last = max(1, 256 // step) * step
    largest = min(limit, last) // step * step
    assert edge == exact(largest or None, largest + step if largest < last else None)
    assert len(set(tried)) == len(tried) <= 20


@pytest.mark.parametrize("start", [1, 64, 10_000])
def test_it_does_not_matter_where_it_starts(start):
    assert search(lambda batch: 7 * batch, starts=(start,))[0] == exact(142, 143)
