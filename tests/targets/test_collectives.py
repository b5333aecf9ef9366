"""What a compiled program sends from device to device is read from its text."""

import pytest

from pegprof.targets.collectives import Collective, find_collectives, floor_s

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
