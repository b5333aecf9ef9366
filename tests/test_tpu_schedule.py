"""Reading a TPU kernel's schedule: which bundles a step of the grid executes, and what follows from their number."""

from pathlib import Path

import pytest

from benchmarks import tpu_kernels
from benchmarks.tpu_schedule import DELAY, parse_schedule
from pegprof.targets.chips import CHIPS

KEY = """= control target key start
LH: loop header
LB: loop body
PF: predicated region fallthrough
= control target key end

"""


def schedule_text(*parts: tuple[int, str, str, str]) -> str:
    """Bundles by parts: how many, the mark and depth of the first, its text and its comment. Depths are not read."""
    lines: list[str] = []
    for count, mark, text, comment in parts:
        lines += [f"{len(lines):#6x} {mark} {{ {text} }} {comment}", *[f"{'0x0':>6}   : > {{}}"] * (count - 1)]
    return KEY + "\n".join(lines) + "\n"


START = (3, "  : ", "%s1 = smov 0", "")
GRID = (10, "LB: >", "%s2 = sadd.s32 1, %s1", "/* Start region 90 :: Start region 7 */")
SKIP_ZEROING = (1, "  : >", "%5 = sbr.rel (!%p3_p1) target = $region44", "/* Start region 43 */")
ZEROING = (DELAY + 20, "  : >", "vst [vmem:[#allocation12] sm:$0xff]", "/* End region 43 */")
AFTER_ZEROING = (2, "PF: >", "%s9 = smov 0", "/* Start/End empty region 44 */")
PARTS = (1, "LB: >>", "%p7_p1 = scmp.ge.s32.totalorder %s4_s28, 8 /* loop exit test */", "/* Start region 60 */")
PRODUCT = (30, "  : >>", "%6 = vmatmul.bf16.gmra.mxu0 %v1", "")
END_OF_PARTS = (1 + DELAY, "  : >>", "%v1 = vadd.f32 %v2, %v3  ;;  %8 = sbr.rel (!%p7_p1) target = $region60", "")
GRID_TEST = (1, "  : >", "%p9_p1 = scmp.ge.s32.totalorder %s20, 66 /* loop exit test */", "")
END_OF_GRID = (1 + DELAY, "  : ", "%37 = sbr.rel (!%p9_p1) target = $region90", "")
END = (5, "  : ", "%1 = vsyncpa [#allocation7], 1", "")


def test_a_step_of_the_grid_is_what_its_loop_executes() -> None:
    schedule = parse_schedule(schedule_text(START, GRID, GRID_TEST, END_OF_GRID, END))
    assert schedule.executed == 10 + 1 + 1 + DELAY
    assert set(schedule.runs) == {0, 1}


def test_the_body_of_an_inner_loop_counts_as_often_as_it_runs() -> None:
    schedule = parse_schedule(schedule_text(START, GRID, PARTS, PRODUCT, END_OF_PARTS, GRID_TEST, END_OF_GRID, END))
    assert schedule.executed == 10 + 8 * (1 + 30 + 1 + DELAY) + 1 + 1 + DELAY


def test_loops_in_loops_multiply() -> None:
    test = "%p2_p2 = scmp.ge.s32.totalorder %s5_s1, 3 /* loop exit test */"
    outer = (4, "LB: >>", test, "/* Start region 50 */")
    end_of_outer = (1 + DELAY, "  : >>", "%8 = sbr.rel (!%p2_p2) target = $region50", "")
    parts = (START, GRID, outer, PARTS, PRODUCT, END_OF_PARTS, end_of_outer, GRID_TEST, END_OF_GRID, END)
    schedule = parse_schedule(schedule_text(*parts))
    assert schedule.executed == 10 + 3 * (4 + 8 * (31 + 1 + DELAY) + 1 + DELAY) + 2 + DELAY


def test_what_is_skipped_and_multiplies_nothing_is_left_out() -> None:
    """But for the bundles after the branch, which run before it is taken."""
    parts = (START, GRID, SKIP_ZEROING, ZEROING, AFTER_ZEROING, GRID_TEST, END_OF_GRID, END)
    assert parse_schedule(schedule_text(*parts)).executed == 10 + 1 + DELAY + 2 + 1 + 1 + DELAY


def test_what_is_skipped_where_nothing_is_to_be_done_counts() -> None:
    parts = (START, GRID, SKIP_ZEROING, PRODUCT, AFTER_ZEROING, GRID_TEST, END_OF_GRID, END)
    assert parse_schedule(schedule_text(*parts)).executed == 10 + 1 + 30 + 2 + 1 + 1 + DELAY


def test_a_finish_that_is_skipped_may_have_loops_of_its_own() -> None:
    test = "%p2_p2 = scmp.ge.s32.totalorder %s5_s1, 8 /* loop exit test */"
    finish = (40, "LB: >>", test, "/* Start region 50 */")
    end_of_finish = (1 + DELAY, "  : >>", "%8 = sbr.rel (!%p2_p2) target = $region50", "")
    gap = (DELAY, "  : >", "", "")
    parts = (START, GRID, SKIP_ZEROING, gap, finish, end_of_finish, AFTER_ZEROING, GRID_TEST, END_OF_GRID, END)
    assert parse_schedule(schedule_text(*parts)).executed == 10 + 1 + DELAY + 2 + 1 + 1 + DELAY


def test_a_bundle_may_have_several_lines() -> None:
    text = schedule_text(START, GRID, GRID_TEST, END_OF_GRID, END)
    longer = text.replace("%s2 = sadd.s32 1, %s1 }", "dma.hbm_to_vmem /*\nbase_bounds: (64, 8)\nstrides: (1, 8) */ }")
    assert longer != text
    assert parse_schedule(longer).runs == parse_schedule(text).runs


def usage_text(schedule_bundles: int) -> str:
    rows = "\n".join(["1 0 2"] * schedule_bundles)
    return f"== CAPACTIY:\nMXU, XLU, VALU\n    4     3     4\n== UTILIZATION:\n{rows}\n"


def test_units_are_busy_by_what_is_executed() -> None:
    schedule = parse_schedule(schedule_text(START, GRID, PARTS, PRODUCT, END_OF_PARTS, GRID_TEST, END_OF_GRID, END))
    busy = schedule.utilization(usage_text(len(schedule.bundles)))
    assert busy == {"MXU": pytest.approx(0.25), "XLU": 0, "VALU": pytest.approx(0.5)}


def test_a_dump_has_one_kernel(tmp_path: Path) -> None:
    text = schedule_text(START, GRID, GRID_TEST, END_OF_GRID, END)
    (tmp_path / "17-pegprof_outer.1-72-final_bundles.txt").write_text(text, encoding="utf-8")
    (tmp_path / "17-pegprof_outer.1-71-schedule-analysis_final_bundles.txt").write_text("", encoding="utf-8")
    usage = tmp_path / "17-pegprof_outer.1-70-final_hlo-static-per-bundle-utilization.txt"
    usage.write_text(usage_text(len(parse_schedule(text).bundles)), encoding="utf-8")
    assert tpu_kernels.read_dump(tmp_path) == {"bundles": 16, "busiest": "VALU 50%, MXU 25%, XLU 0%"}


@pytest.mark.parametrize(("bundles", "ratio"), [(16384, 1.0), (20480, 1.25), (100, 1.0)])
def test_cycles_are_bundles_or_what_the_matrix_units_need(bundles: int, ratio: float) -> None:
    """Two cores, each with one of two tiles of 1024×2048, and 64 examples."""
    facts = {
        "sizes": {"T": 512, "D": 1024, "E": 4096},
        "tile": {"T": 512, "D": 1024, "E": 2048},
        "tiles": 2,
        "steps": 1,
        "rows": "stored",
        "columns": "stored",
        "flops": 2 * 64 * 512 * 1024 * 4096,
        "bytes": 2.765e9,
        "held_bytes": 2**20,
        "used_bytes": 2**20,
    }
    row = tpu_kernels.make_row(CHIPS["tpu-v5p"], 64, "up", facts, {"bundles": bundles, "busiest": ""})
    assert (row["steps_of_a_core"], row["tile"], row["traffic_ms"]) == (64, "1024×2048×512", 1.0)
    assert row["unit_cycles_a_step"] == pytest.approx(16384, rel=1e-3)  # four units of 128×128
    assert row["ratio"] == pytest.approx(ratio, rel=2e-3)
