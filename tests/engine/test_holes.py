"""A hole in the table of rules is not an error: the default fold takes every gradient, and is right."""

import pytest

from pegprof import grad_stats, make_plan
from pegprof.engine.rules import RULES, SCHEDULES
from tests.engine.cases import case, only, tolerance, truth
from tests.oracles import assert_stats_agree, quick_jit
from tests.programs import PROGRAMS

pytestmark = pytest.mark.usefixtures("x64")

STATS = ("mean", "second_moment", "variance", "norm")


@pytest.fixture
def no_rules(monkeypatch):
    for name in list(RULES):
        monkeypatch.delitem(RULES, name)
    assert not RULES


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize("name", PROGRAMS)
def test_with_every_rule_deleted_all_programs_stay_right(name):
    program = PROGRAMS[name]
    loss, params, batch = case(name, 5)
    actual = quick_jit(grad_stats(loss, STATS, keep_batch_dim=program.keep_batch_dim))(params, batch)
    assert_stats_agree(actual, truth(name, 5, STATS), tolerance(program))


SOME = ["dense_with_bias", "tied_embedding", "scanned_layers_rematerialised", "rnn_by_scan"]
ONE_LESS = [
    *(("factored", name, STATS) for name in SOME),
    ("patches", "separable_convolution", STATS),
    ("depthwise", "separable_convolution", STATS),
    ("segment", "embedding_of_one_token", STATS),
    ("tied", "tied_embedding", STATS),
    ("staged", "tied_embedding", ("mean", "second_moment", "norm")),
    ("gram", "scanned_layers_rematerialised", ("norm",)),
    ("batched_gram", "scanned_layers_rematerialised", ("norm",)),
]


def _strategies(name, stats):
    return {row.strategy for row in make_plan(*case(name, 5), stats=stats).rows}


@pytest.mark.parametrize(("missing", "name", "stats"), ONE_LESS, ids=[f"{rule}-{name}" for rule, name, _ in ONE_LESS])
def test_with_one_rule_deleted_the_others_stay_right(missing, name, stats, monkeypatch):
    with monkeypatch.context() as patch:
        only(patch, missing)
        assert missing in _strategies(name, stats) or name in SOME[1:]
    only(monkeypatch, *set(RULES) - {missing})
    assert missing not in _strategies(name, stats)
    loss, params, batch = case(name, 5)
    assert_stats_agree(quick_jit(grad_stats(loss, stats))(params, batch), truth(name, 5, stats))


def test_every_rule_is_deleted_once():
    kernels = {name for name, rule in RULES.items() if rule.is_kernel}  # tests/engine/test_kernels.py
    assert {missing for missing, _, _ in ONE_LESS} == set(RULES) - kernels


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize("missing", ["loop", "batched"])
@pytest.mark.parametrize("name", SOME)
def test_with_one_schedule_of_the_fold_deleted_the_others_stay_right(name, missing, monkeypatch):
    monkeypatch.delitem(SCHEDULES, missing)
    loss, params, batch = case(name, 5)
    assert_stats_agree(quick_jit(grad_stats(loss, STATS))(params, batch), truth(name, 5, STATS))
