"""The parser, on texts small enough to read."""

import pytest

from pegprof.targets.hlo.module import parse_module, parse_operation

LOOP = """\
HloModule jit_f, is_scheduled=true

FileNames
1 "/home/me/model.py"
2 "/usr/lib/python3/site-packages/flax/dense.py"

FunctionNames
1 "loss"
2 "__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=8 end_column=42}
2 {file_name_id=2 function_name_id=2 line=99 end_line=99 column=8 end_column=42}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p = (s32[]{:T(128)}, /*index=1*/f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %tanh.7 = f32[8,128]{1,0:T(8,128)S(1)} tanh(%x), frontend_attributes={kernel_metadata={},pegprof_flops="12"}, metadata={op_name="jit(f)/params[\\'w\\']/tanh" stack_frame_id=2}, backend_config={"window_config":{"estimated_cycles":"1750"},
"more": 1
}, "and": "more"}}
  ROOT %t = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%next, %tanh.7)
}

%condition (q: (s32[], f32[8,128])) -> pred[] {
  %q = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %n = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[]{:T(512)} compare(%j, %n), direction=LT
}

ENTRY %main (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0), metadata={op_name="a"}
  %start = s32[]{:T(128)} constant(START)
  %copied = s32[]{:T(128)} copy(%start)
  %carried = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%copied, %a)
  %while.1 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%carried), condition=%condition, body=%body
  ROOT %result = f32[8,128]{1,0:T(8,128)} get-tuple-element(%while.1), index=1
}
"""  # noqa: E501


def test_a_module_has_its_computations_and_their_operations():
    module = parse_module(LOOP.replace("START", "0"))
    assert module.name == "jit_f"
    assert list(module.computations) == ["body", "condition", "main"]
    assert [each.opcode for each in module.entry.operations] == [
        "parameter", "constant", "copy", "tuple", "while", "get-tuple-element",
    ]  # fmt: skip
    assert module.entry.root.name == "result"
    assert module.entry.by_name["while.1"].called == ("condition", "body")


def test_a_backend_configuration_may_go_over_several_lines():
    module = parse_module(LOOP.replace("START", "0"))
    operation = module.computations["body"].by_name["tanh.7"]
    assert operation.backend_config.endswith('"and": "more"}}')
    assert module.computations["body"].root.operands == ("next", "tanh.7")


@pytest.mark.parametrize(("start", "trips"), [("0", 7), ("3", 4), ("9", 0)])
def test_a_loop_runs_from_where_it_starts_to_the_constant_of_its_condition(start, trips):
    module = parse_module(LOOP.replace("START", start))
    assert module.trip_count(module.entry.by_name["while.1"], module.entry) == trips


def test_a_loop_runs_as_often_as_its_configuration_says():
    text = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"64"}}')
    module = parse_module(text.replace("START", "0"))
    assert module.trip_count(module.entry.by_name["while.1"], module.entry) == 64


def test_a_loop_with_another_condition_runs_nobody_knows_how_often():
    module = parse_module(LOOP.replace("START", "0").replace("direction=LT", "direction=NE"))
    assert module.trip_count(module.entry.by_name["while.1"], module.entry) is None


def test_a_source_is_the_innermost_line_outside_of_installed_packages():
    module = parse_module(LOOP.replace("START", "0"))
    assert module.source(module.computations["body"].by_name["tanh.7"]) == "/home/me/model.py:12"
    assert module.source(module.entry.root) == ""


def test_names_attributes_and_memory_of_an_operation_are_read():
    operation = parse_module(LOOP.replace("START", "0")).computations["body"].by_name["tanh.7"]
    assert operation.op_name == "jit(f)/params['w']/tanh"
    assert operation.frontend_attributes == {"pegprof_flops": "12"}
    assert operation.stem == "tanh"
    assert operation.results[0].space == 1
    assert operation.results[0].main_bytes == 0


def test_a_call_without_a_name_is_called_after_its_target():
    line = '  %custom-call.3 = (f32[4]{0}, s8[64]{0}) custom-call(%x), custom_call_target="__cublas$gemm"'
    assert parse_operation(line).stem == "__cublas$gemm"


def test_a_result_that_is_a_tuple_has_all_its_arrays():
    line = "  ROOT %c = (f32[2,3]{1,0:T(8,128)S(1)}, /*index=1*/bf16[5]{0}, u32[]{:S(2)}) copy-start(%x)"
    operation = parse_operation(line)
    assert [str(array) for array in operation.results] == ["f32[2,3]", "bf16[5]", "u32[]"]
    assert [array.bytes for array in operation.results] == [8 * 128 * 4, 10, 4]
    assert operation.operands == ("x",)
