"""What operations move, on texts small enough to read. A row of [4,256] is 1024 bytes, all of it 4096."""

import pytest

from pegprof.targets.hlo.module import parse_module
from pegprof.targets.hlo.traffic import moved_bytes

ROW, ALL = 1024, 4096

BODIES = {
    "slice_taken": (
        "  ROOT %s = f32[1,256]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,256}",
        "f32[1,256]{1,0}",
        2 * ROW + 4,
    ),
    "slice_through_a_bitcast": (
        (
            "  %b = f32[4,256]{1,0} bitcast(%p0)\n"
            "  %s = f32[1,256]{1,0} dynamic-slice(%b, %p1, %p1), dynamic_slice_sizes={1,256}\n"
            "  ROOT %r = f32[1,256]{1,0} negate(%s)"
        ),
        "f32[1,256]{1,0}",
        2 * ROW + 4,
    ),
    "update_in_place": (
        (
            "  %z = f32[] constant(0)\n"
            "  %u = f32[1,256]{1,0} broadcast(%z), dimensions={}\n"
            "  ROOT %d = f32[4,256]{1,0} dynamic-update-slice(%p0, %u, %p1, %p1)"
        ),
        "f32[4,256]{1,0}",
        ROW + 4,
    ),
    "update_of_something_new": (
        (
            "  %n = f32[4,256]{1,0} negate(%p0)\n"
            "  %z = f32[] constant(0)\n"
            "  %u = f32[1,256]{1,0} broadcast(%z), dimensions={}\n"
            "  ROOT %d = f32[4,256]{1,0} dynamic-update-slice(%n, %u, %p1, %p1)"
        ),
        "f32[4,256]{1,0}",
        2 * ALL + 4,
    ),
    "transpose": ("  ROOT %t = f32[256,4]{1,0} transpose(%p0), dimensions={1,0}", "f32[256,4]{1,0}", 2 * ALL),
    "read_twice": ("  ROOT %t = f32[4,256]{1,0} add(%p0, %p0)", "f32[4,256]{1,0}", 2 * ALL),
    "two_results": (
        (
            "  %a = f32[4,256]{1,0} negate(%p0)\n"
            "  %b = f32[4,256]{1,0} abs(%p0)\n"
            "  ROOT %t = (f32[4,256]{1,0}, f32[4,256]{1,0}) tuple(%a, %b)"
        ),
        "(f32[4,256]{1,0}, f32[4,256]{1,0})",
        3 * ALL,
    ),
    "result_near": ("  ROOT %n = f32[4,256]{1,0:S(1)} negate(%p0)", "f32[4,256]{1,0:S(1)}", ALL),
    "gather": (
        (
            "  %i = s32[2,1]{1,0} iota(), iota_dimension=0\n"
            "  ROOT %g = f32[2,256]{1,0} gather(%p0, %i), offset_dims={1}, slice_sizes={1,256}"
        ),
        "f32[2,256]{1,0}",
        4 * ROW,
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_fusion_moves_what_it_touches(name):
    body, result, expected = BODIES[name]
    text = f"""\
HloModule m

%fused (p0: f32[4,256], p1: s32[]) -> f32[4,256] {{
  %p0 = f32[4,256]{{1,0}} parameter(0)
  %p1 = s32[] parameter(1)
{body}
}}

ENTRY %main (x: f32[4,256], i: s32[]) -> f32[4,256] {{
  %x = f32[4,256]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = {result} fusion(%x, %i), kind=kLoop, calls=%fused
}}
"""
    module = parse_module(text)
    assert moved_bytes(module, module.entry, module.entry.root) == expected


PLAIN = """\
HloModule m

ENTRY %main (x: f32[4,256], i: s32[]) -> f32[4,256] {
  %x = f32[4,256]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %near = (f32[4,256]{1,0:S(1)}, f32[4,256]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %there = f32[4,256]{1,0:S(1)} copy-done(%near)
  %free = f32[1024]{0} bitcast(%x)
  %buffer = f32[4,256]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %row = f32[1,256]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={1,256}
  %update = f32[4,256]{1,0} dynamic-update-slice(%x, %row, %i, %i)
  %product = (f32[4,4]{1,0}, s8[4194304]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"
  ROOT %away = f32[4,256]{1,0} copy(%there)
}
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("near", ALL),  # read here, written near
        ("there", 0),
        ("free", 0),
        ("buffer", 0),
        ("row", 2 * ROW + 8),
        ("update", 2 * ROW),
        ("product", ALL + 64),  # what the library works in is no traffic
        ("away", ALL),
    ],
)
def test_an_operation_alone_moves_what_it_touches(name, expected):
    module = parse_module(PLAIN)
    assert moved_bytes(module, module.entry, module.entry.by_name[name]) == expected
