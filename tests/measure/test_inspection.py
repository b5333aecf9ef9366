"""What ``pegprof inspect`` shows, from a fixed plan."""

import dataclasses
import json

import pytest

from pegprof.measure.inspection import Inspection, Leaf
from pegprof.report.inspection_text import find_alike, render_inspection
from tests.result.results import PLAN

INSPECTION = Inspection(
    model="transformer-151m",
    description="decoder-only transformer",
    options={"seq_len": 512, "layers": 2},
    parameters=184_415_232,
    parameter_bytes=737_660_928,
    dtype="float32",
    keep_batch_dim=False,
    example=(Leaf(name="tokens", dtype="int32", shape=(513,)), Leaf(name="weight", dtype="float32", shape=())),
    plan=PLAN,
)

GOLDEN = """\
transformer-151m: 184,415,232 parameters (703.5 MiB), float32
decoder-only transformer
options: seq_len=512 layers=2
an example: tokens int32[513], weight float32[]; the loss takes it bare

plan for mean, second_moment of 64 examples on cpu, 8 at a time
parameters                                shape          T  strategy    flops      moved
────────────────────────────────────────────────────────────────────────────────────────
4 × block_*/attention/{key,query}/kernel  1024×16×64   512  loop      276.0 G    3.7 GiB
embed/embedding                           32100×1024  1024  tied        2.2 T   32.6 GiB
final_norm/scale                          1024           –  direct          0  124.0 MiB
Not shown at this width: contraction, bytes each; a wider terminal, or COLUMNS=123, shows all.
loop: one product an example, every statistic from it
tied: one product an example, the rows looked up added into it
direct: the gradient is no larger than what it is made from"""


def test_it_reads_so():
    assert render_inspection(INSPECTION) == GOLDEN


@pytest.mark.parametrize("width", [70, 80, 140])
def test_it_fits(width):
    lines = render_inspection(INSPECTION, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("Not shown at this width") for line in lines) == (width < 140)


def test_sites_that_differ_in_how_they_are_done_stand_apart():
    first, *rest = PLAN.rows
    rows = [dataclasses.replace(first, strategy="batched"), *rest]
    found = [(sites.count, sites.name, sites.row.strategy) for sites in find_alike(rows)]
    assert found[:3] == [
        (1, "block_0/attention/key/kernel", "batched"),
        (2, "block_*/attention/query/kernel", "loop"),
        (1, "block_1/attention/key/kernel", "loop"),
    ]


def test_as_json_it_is_whole():
    data = json.loads(INSPECTION.to_json())
    assert data["schema"] == 2
    assert data["example"][0] == {"name": "tokens", "dtype": "int32", "shape": [513]}
    assert [row["parameter"] for row in data["plan"]["rows"]] == [row.parameter for row in PLAN.rows]
    assert data["plan"]["rows"][0]["candidates"][0]["seconds"] == 1.5
