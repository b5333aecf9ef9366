"""Prices and their sums, on a program small enough to add up by hand."""

import json

import pytest

from pegprof.targets.chips import CHIPS
from pegprof.targets.devices import DEVICES
from pegprof.targets.hlo.estimate import Estimate, estimate

CHIP = CHIPS["tpu-v5p"]

PROGRAM = """\
HloModule m

%body (p: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
  %p = (s32[], f32[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1024,1024]{1,0} get-tuple-element(%p), index=1
  %kernel.2 = f32[1024,1024]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={pegprof_flops="918000000",pegprof_kernel="outer",pegprof_bytes="1000"}, metadata={op_name="k"}
  ROOT %t = (s32[], f32[1024,1024]{1,0}) tuple(%i, %kernel.2)
}

%condition (q: (s32[], f32[1024,1024])) -> pred[] {
  %q = (s32[], f32[1024,1024]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant(10)
  ROOT %lt = pred[] compare(%j, %n), direction=LT
}

ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0} parameter(0)
  %dot.1 = f32[1024,1024]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, backend_config={"estimated_cycles":"16000"}
  %zero = s32[] constant(0)
  %carried = (s32[], f32[1024,1024]{1,0}) tuple(%zero, %dot.1)
  %while.1 = (s32[], f32[1024,1024]{1,0}) while(%carried), condition=%condition, body=%body
  %out = f32[1024,1024]{1,0} get-tuple-element(%while.1), index=1
  ROOT %turned = f32[1024,1024]{0,1} copy(%out)
}
"""  # noqa: E501

DOT_S = 16000 / 1.75e9
EFFICIENCY = (2 * 1024**3 / CHIP.float32_flops) / DOT_S


def test_the_estimate_is_the_compilers_price_else_the_roofline():
    by_name = {each.name: each for each in estimate(PROGRAM, "tpu-v5p").operations}
    assert set(by_name) == {"dot.1", "kernel.2", "turned"}
    assert by_name["dot.1"].estimate_s == by_name["dot.1"].compiler_s == pytest.approx(DOT_S)
    assert by_name["turned"].compiler_s is None
    assert by_name["turned"].estimate_s == pytest.approx(2 * 4 * 1024**2 / CHIP.bandwidth)


def test_a_kernel_is_priced_as_the_compiler_prices_products():
    found = estimate(PROGRAM, "tpu-v5p")
    (kernel,) = found.kernels
    assert found.efficiency == pytest.approx(EFFICIENCY)
    assert kernel.kernel == "outer"
    assert kernel.trips == 10
    assert kernel.roofline_s == pytest.approx(918e6 / CHIP.float32_flops)
    assert kernel.estimate_s == pytest.approx(kernel.roofline_s / EFFICIENCY)


def test_products_that_are_bound_by_memory_do_not_make_kernels_cheaper():
    """Where no operation is mostly a product, those that have one still say what the compiler grants."""
    thin = PROGRAM.replace("dot(%a, %a), lhs_contracting_dims={1}", "dot(%a, %a), lhs_contracting_dims={}")
    assert estimate(thin, "tpu-v5p").efficiency < 1


def test_operations_add_up():
    found = estimate(PROGRAM, "tpu-v5p")
    assert found.time_s == pytest.approx(sum(each.estimate_s * each.trips for each in found.operations))
    assert found.flops == 2 * 1024**3 + 10 * 918_000_000
    assert found.bytes == 4 * 2**22 + 10 * 1000
    assert found.flops_coverage == pytest.approx(2 * 1024**3 / found.flops)
    assert [each.name for each in found.largest(2)] == ["kernel.2", "dot.1"]


def test_an_estimate_survives_json():
    found = estimate(PROGRAM, "tpu-v5p")
    assert Estimate.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_loop_of_unknown_length_is_told():
    found = estimate(PROGRAM.replace("direction=LT", "direction=NE"), "tpu-v5p")
    assert found.unknown_trips == ("while.1",)
    assert found.kernels[0].trips == 1


BRANCHES = """\
HloModule m

%little (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  ROOT %once = f32[64,64]{1,0} negate(%p)
}

%much (q: f32[64,64]) -> f32[64,64] {
  %q = f32[64,64]{1,0} parameter(0)
  %first = f32[64,64]{1,0} negate(%q)
  ROOT %second = f32[64,64]{1,0} negate(%first)
}

ENTRY %main (i: s32[], a: f32[64,64]) -> f32[64,64] {
  %i = s32[] parameter(0)
  %a = f32[64,64]{1,0} parameter(1)
  ROOT %c = f32[64,64]{1,0} conditional(%i, %a, %a), branch_computations={%little, %much}
}
"""


def test_of_branches_the_one_that_moves_most_counts():
    assert [each.name for each in estimate(BRANCHES, "h100").operations] == ["first", "second"]


SOL = '{"exec_time_us":7.5,"compute_time_us":0,"name":"sol"}'
HOLE = '{"exec_time_us":0.01,"compute_time_us":0,"name":"sol"}'
INDEXING = '{"exec_time_us":9.5,"compute_time_us":1,"name":"indexing-cost-model"}'


@pytest.mark.parametrize(
    ("kind", "models", "expected_s"),
    [("", SOL, 7.5e-6), ("", f"{INDEXING},{SOL}", 7.5e-6), ("__triton", f"{INDEXING},{HOLE}", 9.5e-6)],
)
def test_a_gpus_price_is_the_model_sol_or_what_fills_its_hole(kind, models, expected_s):
    config = f'{{"fusion_backend_config":{{"kind":"{kind}"}},"reification_cost":[{models}]}}'
    text = PROGRAM.replace('{"estimated_cycles":"16000"}', config)
    assert estimate(text, "h100").operations[0].compiler_s == pytest.approx(expected_s)


def test_a_product_that_is_not_in_the_table_of_a_gpus_compiler_has_no_price():
    text = PROGRAM.replace('{"estimated_cycles":"16000"}', f'{{"reification_cost":[{SOL}]}}')
    mixed = text.replace("%a = f32[1024,1024]", "%a = bf16[1024,1024]")
    assert estimate(text, "h100").operations[0].compiler_s == pytest.approx(7.5e-6)
    assert estimate(mixed, "h100").operations[0].compiler_s is None
    assert estimate(mixed, "h100").flops_coverage == 0


def test_every_device_that_can_be_compiled_for_has_its_figures():
    assert CHIPS.keys() == DEVICES.keys()
    for name, chip in CHIPS.items():
        assert chip.name == name
        assert (chip.clock_hz is None) == (chip.backend == "gpu")
        assert chip.backend == DEVICES[name].compiler.backend
        assert chip.bfloat16_flops >= chip.float32_flops >= chip.highest_flops
