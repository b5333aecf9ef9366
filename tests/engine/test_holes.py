"""A hole in the table of strategies is not an error: what no strategy knows is materialised, and right."""

import pytest

from pegprof import grad_stats
from pegprof.engine import strategies
from tests.engine.cases import case, tolerance, truth
from tests.oracles import assert_stats_agree, quick_jit
from tests.programs import PROGRAMS

pytestmark = pytest.mark.usefixtures("x64")

STATS = ("mean", "second_moment", "variance", "norm")


@pytest.fixture
def materialise_only(monkeypatch):
    for name in list(strategies.STRATEGIES):
        if name != "materialise":
            monkeypatch.delitem(strategies.STRATEGIES, name)
    assert list(strategies.STRATEGIES) == ["materialise"]


@pytest.mark.usefixtures("materialise_only")
@pytest.mark.parametrize("name", PROGRAMS)
def test_with_every_strategy_but_materialise_deleted_all_programs_stay_right(name):
    program = PROGRAMS[name]
    loss, params, batch = case(name, 5)
    actual = quick_jit(grad_stats(loss, STATS, keep_batch_dim=program.keep_batch_dim))(params, batch)
    assert_stats_agree(actual, truth(name, 5, STATS), tolerance(program))


@pytest.mark.parametrize("missing", ["direct", "factored", "loop"])
@pytest.mark.parametrize("name", ["dense_with_bias", "tied_embedding", "scanned_layers_rematerialised", "rnn_by_scan"])
def test_with_one_strategy_deleted_the_others_stay_right(name, missing, monkeypatch):
    monkeypatch.delitem(strategies.STRATEGIES, missing)
    loss, params, batch = case(name, 5)
    assert_stats_agree(quick_jit(grad_stats(loss, STATS))(params, batch), truth(name, 5, STATS))
