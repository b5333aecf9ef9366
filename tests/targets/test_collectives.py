"""What a compiled program sends from device to device is read from its text."""

import pytest

from pegprof.targets.hlo.collectives import Collective, find_collectives, floor_s

TEXT = """\
HloModule jit_step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[16])) -> (s32[], f32[16]) {
  %state = (s32[], f32[16]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[16] get-tuple-element(%state), index=1
  %all = f32[64]{0} all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, metadata={source_file="m.py" source_line=3}
  %first = f32[16] slice(%all), slice={[0:16]}
  ROOT %next = (s32[], f32[16]) tuple(%i, %first)
}

%more (state: (s32[], f32[16])) -> pred[] {
  %state = (s32[], f32[16]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] constant(5)
  ROOT %is_more = pred[] compare(%i, %n), direction=LT
}

%all-reduce-scatter.1 (input: f32[64]) -> f32[16] {
  %input = f32[64] parameter(0)
  %all = f32[64] all-reduce(%input), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}, to_apply=%add
  ROOT %part = f32[16] slice(%all), slice={[0:16]}
}

ENTRY %main (x: f32[16]) -> f32[16] {
  %x = f32[16] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[16]) tuple(%zero, %x)
  %loop = (s32[], f32[16]) while(%start), condition=%more, body=%body, metadata={source_file="m.py" source_line=2}
  %y = f32[16] get-tuple-element(%loop), index=1
  %reducing = f32[16] all-reduce-start(%y), replica_groups=[1,8]<=[8], to_apply=%add
  %reduced = f32[16] all-reduce-done(%reducing)
  %four = f32[64] concatenate(%reduced, %reduced, %reduced, %reduced), dimensions={0}
  ROOT %scattered = f32[16] fusion(%four), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_collectives_have_their_bytes_trips_loop_and_line():
    in_loop, outside, _ = find_collectives(TEXT)
    assert in_loop == Collective(
        kind="all-gather", count=1, bytes=256, trips=5, devices=4, loop="m.py:2", source="m.py:3"
    )
    assert in_loop.total_bytes == 1280
    assert (outside.kind, outside.count, outside.bytes, outside.trips, outside.devices) == ("all-reduce", 1, 64, 1, 8)
    assert outside.loop == ""


def test_a_fusion_of_an_all_reduce_and_its_slices_is_a_reduce_scatter():
    *_, scattered = find_collectives(TEXT)
    assert (scattered.kind, scattered.bytes, scattered.devices) == ("reduce-scatter", 64, 4)


def test_a_floor_is_what_must_be_sent_over_the_published_bandwidth():
    gather, reduce, scatter = find_collectives(TEXT)
    assert scatter.sent_bytes == 3 * 64
    assert gather.sent_bytes == pytest.approx(1280 * 3 / 4)
    assert reduce.sent_bytes == pytest.approx(2 * 64 * 7 / 8)
    assert floor_s([gather, reduce], "tpu-v5p") == pytest.approx((960 + 112) / 6e11)
    assert floor_s([gather], "t4") is None


COMBINED = """\
HloModule jit_step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%narrow (p: f32[64]) -> bf16[64] {
  %p = f32[64] parameter(0)
  ROOT %narrowed = bf16[64] convert(%p)
}

%joined (p: f32[8], q: f32[64]) -> f32[72] {
  %p = f32[8] parameter(0)
  %q = f32[64] parameter(1)
  ROOT %both = f32[72] concatenate(%p, %q), dimensions={0}
}

%first (p: f32[72]) -> f32[8] {
  %p = f32[72] parameter(0)
  ROOT %part = f32[8] slice(%p), slice={[0:8]}
}

%second (p: f32[72]) -> f32[64] {
  %p = f32[72] parameter(0)
  %part = f32[64] slice(%p), slice={[8:72]}
  %eighth = f32[] constant(0.125)
  %eighths = f32[64] broadcast(%eighth), dimensions={}
  ROOT %mean = f32[64] multiply(%part, %eighths)
}

%some (p: bf16[64]) -> bf16[512] {
  %p = bf16[64] parameter(0)
  ROOT %all = bf16[512] all-gather(%p), channel_id=3, dimensions={0}, frontend_attributes={chain_id="0"}
}

%more (p: bf16[64]) -> bf16[512] {
  %p = bf16[64] parameter(0)
  ROOT %all = bf16[512] all-gather(%p), channel_id=3, dimensions={0}, frontend_attributes={chain_id="0"}
}

ENTRY %main (w: f32[64], b: f32[8]) -> (f32[8], f32[64], f32[64]) {
  %w = f32[64] parameter(0), metadata={op_name="params[\\'layer\\'][\\'w\\']"}
  %b = f32[8] parameter(1), metadata={op_name="params[\\'layer\\'][\\'b\\']"}
  %narrow_w = bf16[64] fusion(%w), kind=kLoop, calls=%narrow
  %begun = bf16[512] fusion(%narrow_w), kind=kLoop, calls=%some
  %gathered = bf16[512] fusion(%narrow_w), kind=kLoop, calls=%more
  %of_w = f32[64] custom-call(%gathered), custom_call_target="f", metadata={source_file="m.py" source_line=7}
  %of_b = f32[8] custom-call(%b), custom_call_target="f", metadata={source_file="m.py" source_line=8}
  %half = f32[32] custom-call(%b), custom_call_target="f", metadata={source_file="m.py" source_line=10}
  %moved_w = f32[64] copy(%of_w)
  %joint = f32[72] fusion(%of_b, %moved_w), kind=kLoop, calls=%joined
  %reducing = f32[72] all-reduce-start(%joint), channel_id=1, to_apply=%add
  %reduced = f32[72] all-reduce-done(%reducing)
  %grad_b = f32[8] fusion(%reduced), kind=kLoop, calls=%first
  %grad_w = f32[64] fusion(%reduced), kind=kLoop, calls=%second
  %two = (f32[8], f32[32]) all-reduce(%of_b, %half), to_apply=%add, metadata={source_file="m.py" source_line=8}
  %large = f32[32] get-tuple-element(%two), index=1
  %lone = f32[64] custom-call(%large), custom_call_target="f", metadata={source_file="m.py" source_line=9}
  ROOT %results = (f32[8], f32[64], f32[64]) tuple(%grad_b, %grad_w, %lone)
}
"""


def by_kind(text, outputs=()):
    return {(each.kind, each.bytes): each for each in find_collectives(text, outputs)}


def test_a_gather_is_of_the_parameter_that_it_comes_from_and_counts_once_however_many_fusions_share_it():
    gather = by_kind(COMBINED)["all-gather", 1024]
    assert (gather.parameter, gather.count) == ("layer/w", 1)


def test_a_combined_reduction_is_of_the_parameter_that_most_of_its_results_mirror():
    joint = by_kind(COMBINED, ["layer/b", "layer/w", ""])["all-reduce", 288]
    assert (joint.parameter, joint.source) == ("layer/w", "m.py:7")


def test_a_combined_reduction_without_a_line_has_that_of_its_largest_operand():
    assert by_kind(COMBINED)["all-reduce", 288].source == "m.py:7"


def test_a_combined_reduction_has_not_the_line_of_whichever_operand_came_first():
    activations = by_kind(COMBINED)["all-reduce", 160]
    assert (activations.parameter, activations.source) == ("", "m.py:10")
