"""The engine as people run it: in float32."""

import jax
import pytest

from pegprof import grad_stats
from tests.engine.cases import ALL_STATISTICS
from tests.oracles import assert_stats_agree, loop_stats
from tests.programs import PROGRAMS


@pytest.mark.parametrize("name", list(PROGRAMS)[1::9])
def test_statistics_in_float32_agree_with_the_loop_within_its_rounding(name):
    program = PROGRAMS[name]
    loss, params, batch = program.make(jax.random.key(1), 5)
    stats = [stat for stat in ALL_STATISTICS if stat.name != "snr"]  # a ratio: rounding has no bound worth asserting
    actual = jax.jit(grad_stats(loss, stats, keep_batch_dim=program.keep_batch_dim))(params, batch)
    expected = loop_stats(loss, stats, params, batch, keep_batch_dim=program.keep_batch_dim)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(actual)} == {"float32"}
    assert_stats_agree(actual, expected, rtol=0.06 if "bf16" in program.tags else 1e-4)
