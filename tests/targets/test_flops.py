"""Flops of products, beside what counting by hand gives."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegprof.targets.hlo.flops import count_pairs, count_work
from pegprof.targets.hlo.module import parse_module


def work_of(*lines: str):
    body = "\n".join(f"  {line}" for line in lines)
    module = parse_module(f"HloModule m\n\nENTRY %main (x: f32[]) -> f32[] {{\n{body}\n}}\n")
    return count_work(module, module.entry, module.entry.root)


@given(
    length=st.integers(1, 8),
    size=st.integers(1, 5),
    stride=st.integers(1, 4),
    pad=st.integers(0, 4),
    dilate=st.integers(1, 4),
    dilate_kernel=st.integers(1, 3),
    outputs=st.integers(1, 12),
)
def test_pairs_are_counted_as_by_trying_them_all(length, size, stride, pad, dilate, dilate_kernel, outputs):
    def meets(o, k):
        p = o * stride + k * dilate_kernel - pad
        return p >= 0 and p % dilate == 0 and p // dilate < length

    expected = sum(meets(o, k) for o, k in itertools.product(range(outputs), range(size)))
    assert count_pairs(length, size, outputs, stride, pad, dilate, dilate_kernel) == expected


def test_a_dot_with_batch_axes_contracts_what_it_says():
    work = work_of(
        "%x = f32[3,8,16]{2,1,0} parameter(0)",
        "%y = f32[3,16,4]{2,1,0} parameter(1)",
        "ROOT %d = f32[3,8,4]{2,1,0} dot(%x, %y), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}",
    )
    assert work.products == {"float32": 2 * 3 * 8 * 4 * 16}


def test_a_batched_product_that_a_tpu_writes_as_a_convolution_counts_once():
    work = work_of(
        "%x = bf16[64,16,64,512]{3,2,1,0} parameter(0)",
        "%y = bf16[64,16,512,512]{3,2,1,0} parameter(1)",
        "ROOT %c = bf16[64,16,64,512]{3,2,1,0} convolution(%x, %y), "
        "window={size=64x16 stride=63x15 lhs_dilate=64x16}, dim_labels=01bf_01io->01bf",
    )
    assert work.products == {"bfloat16": 2 * 64 * 16 * 64 * 512 * 512}


@pytest.mark.parametrize(("precision", "found"), [("highest", "highest"), ("high", "high"), ("default", "float32")])
def test_the_precision_that_was_asked_for_is_told(precision, found):
    work = work_of(
        "%x = f32[8,16]{1,0} parameter(0)",
        "%y = f32[16,4]{1,0} parameter(1)",
        f"ROOT %d = f32[8,4]{{1,0}} dot(%x, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, "
        f"operand_precision={{{precision},{precision}}}",
    )
    assert list(work.products) == [found]


def test_the_gradient_of_a_convolution_by_a_library_costs_what_the_convolution_costs():
    shapes = {"x": "f32[2,8,8,4]", "w": "f32[3,3,4,16]", "y": "f32[2,8,8,16]"}
    ends = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"

    def flops(target, first, second, result):
        return work_of(
            f"%a = {shapes[first]}{{3,2,1,0}} parameter(0)",
            f"%b = {shapes[second]}{{3,2,1,0}} parameter(1)",
            f"ROOT %c = ({shapes[result]}{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), {ends}, "
            f'custom_call_target="__cudnn$conv{target}"',
        ).flops

    forward = flops("Forward", "x", "w", "y")
    assert forward == 2 * 2 * (3 * 8 - 2) ** 2 * 4 * 16
    assert flops("BackwardInput", "y", "w", "x") == forward
    assert flops("BackwardFilter", "x", "y", "w") == forward


def test_elementwise_operations_count_their_results_and_reductions_what_they_take():
    lines = ["%x = f32[8,16]{1,0} parameter(0)", "%z = f32[] constant(0)"]
    assert work_of(*lines, "ROOT %t = f32[8,16]{1,0} tanh(%x)").vector == 128
    assert work_of(*lines, "ROOT %r = f32[8]{0} reduce(%x, %z), dimensions={1}, to_apply=%sum").vector == 128
