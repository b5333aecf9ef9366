"""Results side by side."""

import dataclasses
from pathlib import Path

from pegprof.report.side_by_side import name_results, render_markdown, render_terminal
from tests.result.results import GIB, GRAD, PLAN, RESULT, SURGERY

BATCHED = dataclasses.replace(PLAN.rows[0], strategy="batched", bytes=2**30)
BEFORE = dataclasses.replace(RESULT, rows=(GRAD, SURGERY))
AFTER = dataclasses.replace(
    RESULT,
    rows=(GRAD, dataclasses.replace(SURGERY, peak_bytes=26 * GIB)),
    plans={64: dataclasses.replace(PLAN, rows=(BATCHED, *PLAN.rows[1:]))},
)
ALONE = dataclasses.replace(RESULT, rows=(dataclasses.replace(GRAD, peak_bytes=17 * GIB),))


def named(*results):
    return name_results([Path(f"{name}.json") for name in "abc"[: len(results)]], results)


def test_two_results_share_a_row_that_says_what_changed():
    lines = render_terminal(named(BEFORE, AFTER)).splitlines()
    assert "13.0 GiB -> 26.0 GiB (+100.0%)" in next(line for line in lines if "surgery" in line)
    assert "block_0/attention/key/kernel: loop -> batched, holding 4.0 MiB -> 1.0 GiB" in lines
    assert max(map(len, lines)) <= 100
    assert "| 64 | cpu | surgery | ok |" in render_markdown(named(BEFORE, AFTER))


THREE = """\
transformer-151m: 3 results; changes are from a.json
batch  target  method   result  status   time × grad           XLA peak  temporaries   flops
────────────────────────────────────────────────────────────────────────────────────────────
   64  cpu     grad     a.json  refused         1.00           85.0 GiB            –  41.3 T
   64  cpu     grad     b.json  refused         1.00           85.0 GiB            –  41.3 T
   64  cpu     grad     c.json  refused         1.00  17.0 GiB (-80.0%)            –  41.3 T
   64  cpu     surgery  a.json  ok              0.99           13.0 GiB            –  41.5 T
   64  cpu     surgery  b.json  ok              0.99  26.0 GiB (+100.0%)            –  41.5 T
   64  cpu     surgery  c.json  –                  –                  –            –       –
b.json: block_0/attention/key/kernel: loop -> batched, holding 4.0 MiB -> 1.0 GiB"""


def test_each_of_several_results_has_a_row_with_its_change_from_the_first():
    text = render_terminal(named(BEFORE, AFTER, ALONE))
    assert [line.split() for line in text.splitlines() if "─" not in line] == [
        line.split() for line in THREE.splitlines() if "─" not in line
    ]
    markdown = render_markdown(named(BEFORE, AFTER, ALONE))
    assert "| 64 | cpu | grad | c.json | refused | 1.00 | 17.0 GiB (-80.0%) |" in markdown


def test_a_narrow_table_says_which_columns_it_leaves_out():
    text = " ".join(render_terminal(named(BEFORE, BEFORE), width=60).split())
    assert "Not shown at this width: temporaries, flops; a wider terminal, or COLUMNS=" in text
