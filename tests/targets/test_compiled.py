"""What the estimator reads from programs that XLA really compiled, for this machine and for absent devices."""

import pytest

from pegprof.targets.chips import CHIPS
from pegprof.targets.hlo.estimate import Estimate, estimate
from pegprof.targets.hlo.flops import count_work
from pegprof.targets.hlo.module import parse_module
from tests.compilers import needs_compilers
from tests.targets.programs import KERNEL, D, N, compile_texts

ABSENT = ["tpu-v5p", "h100"]

pytestmark = needs_compilers


def price(target: str, program: str) -> Estimate:
    return estimate(compile_texts(target)[program]["text"], target)


@pytest.mark.parametrize("target", ABSENT)
def test_an_elementwise_program_moves_its_arguments_and_results(target):
    found = price(target, "add")
    assert found.bytes == compile_texts(target)["add"]["bytes"] == 3 * 4 * D * D
    assert found.flops == 0
    assert found.bytes_coverage == 1


@pytest.mark.parametrize("target", ABSENT)
def test_flops_of_products_are_exact(target):
    assert price(target, "dot").flops == 2 * D * 2 * D * 4 * D
    assert price(target, "batched").flops == 2 * 3 * D * D * 2 * D


@pytest.mark.parametrize("target", ABSENT)
def test_flops_of_a_convolution_leave_its_padding_out(target):
    assert price(target, "convolve").flops == 2 * 8 * (3 * 32 - 2) ** 2 * 128 * 256


@pytest.mark.parametrize("target", ABSENT)
def test_a_scan_of_a_product_costs_as_often_as_it_runs(target):
    found = price(target, "chain")
    assert found.flops == N * 2 * D**3
    assert {each.trips for each in found.operations if each.flops} == {N}
    assert not found.unknown_trips


@pytest.mark.parametrize("target", ABSENT)
def test_a_step_of_a_loop_reads_its_slice_and_not_the_whole(target):
    found = price(target, "total")
    xs_bytes, y_bytes = N * 4 * (4 * D) ** 2, 4 * (4 * D) ** 2
    assert xs_bytes <= found.bytes <= xs_bytes + (2 * N + 2) * y_bytes  # and the sum, read and written at most


@pytest.mark.parametrize("target", ABSENT)
def test_the_compiler_prices_products_near_what_the_chip_can_do(target):
    found = price(target, "dot")
    assert found.flops_coverage == 1
    assert found.floor_s <= found.time_s < 10 * found.floor_s


@pytest.mark.parametrize("target", ABSENT)
def test_a_kernel_is_priced_by_what_it_says_of_itself(target):
    (kernel,) = price(target, "kernel").kernels
    assert (kernel.kernel, kernel.flops, kernel.vector_flops, kernel.bytes) == ("double", 1000, 300, 2000)
    assert kernel.compiler_s is None
    chip = CHIPS[target]
    cache_s = int(KERNEL["cache_bytes"]) / chip.cache_bandwidth if chip.cache_bandwidth else 0
    assert kernel.estimate_s == pytest.approx(max(cache_s, 2000 / chip.bandwidth, 300 / chip.vector_flops))


@pytest.mark.parametrize("target", ABSENT)
def test_a_kernel_in_a_loop_counts_as_often_as_it_runs(target):
    (kernel,) = price(target, "kernels").kernels
    assert kernel.trips == N
    assert kernel.total_bytes == N * 2000


@pytest.mark.parametrize("target", ABSENT)
def test_operations_say_where_they_come_from(target):
    sources = {each.source.rpartition("/")[2].partition(":")[0] for each in price(target, "chain").operations}
    assert "programs.py" in sources


def test_programs_for_the_cpu_are_parsed_too():
    texts = compile_texts("cpu")
    module = parse_module(texts["chain"]["text"])
    loops = [(each, where) for where, each in module.walk() if each.opcode == "while"]
    assert [module.trip_count(*loop) for loop in loops] == [N]
    module = parse_module(texts["dot"]["text"])
    assert sum(count_work(module, module.entry, each).flops for each in module.entry.operations) == 16 * D**3
