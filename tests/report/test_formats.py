"""What people and programs read, from a fixed Result."""

import csv
import dataclasses
import io
from pathlib import Path

import pytest

from pegprof.report import formats, terminal
from pegprof.result.result import Result
from pegprof.result.settings import METHODS, Settings
from tests.result.results import GIB, RESULT, RESULT_ON_TARGETS, make_row

# The contract with everyone who reads the files: more columns may follow, these stay.
HEADER = (
    "model,parameters,batch,seq_len,dtype,stats,method,microbatch_size,target,device,evidence,status,reason,"
    "time_s,time_iqr_s,time_batch,runs,time_ratio,compile_s,peak_bytes,argument_bytes,output_bytes,temp_bytes,"
    "alias_bytes,host_peak_bytes,peak_ratio,capacity_bytes,flops,activation_bytes_per_example,parameter_bytes,"
    "activations_dominate,max_rel_error,materialised_parameters,seed,pegprof,jax,jaxlib,xla_flags,timestamp,"
    # more than the design has, and after it:
    "device_peak_bytes,measured_batch,measured_batch_peak_bytes,compiler,step,optimizer_state_bytes,"
    "mesh,devices,collective_bytes,loop_collective_bytes,collective_floor_s,processes"
)

GOLDEN_100 = """\
transformer-151m: 184.4 M parameters, seq_len 512, float32, batch 64, mean second_moment
cpu: Some Processor, 2 cores, 20.0 GiB available
method      status   time (batch 2)       IQR  × grad  XLA peak  × grad  measured   flops  error
────────────────────────────────────────────────────────────────────────────────────────────────
grad        refused          10.2 s  310.0 ms    1.00  85.0 GiB    1.00         –  41.3 T  2e-06
vmap        refused          14.2 s  620.0 ms    1.39  86.7 GiB    1.02         –  41.4 T      –
microbatch  failed                –         –       –         –       –         –       –      –
surgery     ok               10.1 s   12.3 ms    0.99  13.0 GiB    0.15  12.9 GiB  41.5 T  1e-07
grad: needs 85.0 GiB, 20.0 GiB available
vmap: needs 86.7 GiB, 20.0 GiB available; over bare examples, [as they are]
microbatch: killed by SIGKILL, as the system does when memory runs out; 1 at a time
surgery: 8 at a time
grad, vmap, surgery: timed at batch 2

Activations dominate: on cpu one example takes 1.3 GiB of activations, at least the 706.6 MiB of the
parameters. The trace counts 1.6 GiB, and agrees. The paper's rule disagrees: T ≥ D for none of the
parameters in matrices; it is blind to what attention, norms and the like keep.
vmap: the gradients of 64 examples, 44.2 GiB, could live where 83.8 GiB of activations have died; it
takes 1.02 × the memory of grad and 1.39 × its time (the paper: about 1.17 ×, 17% more).
surgery: keeps no example's gradient beyond its own layer, whatever dominates; it takes 0.15 × the
memory of grad and 0.99 × its time.
A Micro optimizer, which takes mean and second_moment at every step, is affordable here: surgery
takes 0.99 × the time of grad, and 13.0 GiB of 20.0 GiB available, 0.15 × grad.

matrices                                       shape     T     D  T ≥ D
───────────────────────────────────────────────────────────────────────
4 × block_*/attention/{key,query}/kernel  1024×16×64   512  1024     no
embed/embedding                           32100×1024  1024  1985     no"""

GOLDEN_80 = """\
transformer-151m: 184.4 M parameters, seq_len 512, float32, batch 64, mean
second_moment
cpu: Some Processor, 2 cores, 20.0 GiB available
method      status   time (batch 2)  × grad  XLA peak  × grad  measured
───────────────────────────────────────────────────────────────────────
grad        refused          10.2 s    1.00  85.0 GiB    1.00         –
vmap        refused          14.2 s    1.39  86.7 GiB    1.02         –
microbatch  failed                –       –         –       –         –
surgery     ok               10.1 s    0.99  13.0 GiB    0.15  12.9 GiB
grad: needs 85.0 GiB, 20.0 GiB available
vmap: needs 86.7 GiB, 20.0 GiB available; over bare examples, [as they are]
microbatch: killed by SIGKILL, as the system does when memory runs out; 1 at a
time
surgery: 8 at a time
grad, vmap, surgery: timed at batch 2

Activations dominate: on cpu one example takes 1.3 GiB of activations, at least
the 706.6 MiB of the parameters. The trace counts 1.6 GiB, and agrees. The
paper's rule disagrees: T ≥ D for none of the parameters in matrices; it is
blind to what attention, norms and the like keep.
vmap: the gradients of 64 examples, 44.2 GiB, could live where 83.8 GiB of
activations have died; it takes 1.02 × the memory of grad and 1.39 × its time
(the paper: about 1.17 ×, 17% more).
surgery: keeps no example's gradient beyond its own layer, whatever dominates;
it takes 0.15 × the memory of grad and 0.99 × its time.
A Micro optimizer, which takes mean and second_moment at every step, is
affordable here: surgery takes 0.99 × the time of grad, and 13.0 GiB of 20.0 GiB
available, 0.15 × grad.

matrices                                       shape     T     D  T ≥ D
───────────────────────────────────────────────────────────────────────
4 × block_*/attention/{key,query}/kernel  1024×16×64   512  1024     no
embed/embedding                           32100×1024  1024  1985     no"""

GOLDEN_PREVIEW = """\

transformer-151m: 184.4 M parameters, seq_len 512, float32, batch 64, mean second_moment
cpu: Some Processor, 2 cores, 20.0 GiB available
method      status   XLA peak  × grad   flops  compiled in
──────────────────────────────────────────────────────────
grad        refused  85.0 GiB    1.00  41.3 T        4.2 s
vmap        refused  86.7 GiB    1.02  41.4 T        5.3 s
microbatch  failed          –       –       –            –
surgery     ok       13.0 GiB    0.15  41.5 T         11 s
Activations dominate: on cpu one example takes 1.3 GiB of activations, at least the 706.6 MiB of the
parameters. The trace counts 1.6 GiB, and agrees. The paper's rule disagrees: T ≥ D for none of the
parameters in matrices; it is blind to what attention, norms and the like keep.
vmap: the gradients of 64 examples, 44.2 GiB, could live where 83.8 GiB of activations have died; it
takes 1.02 × the memory of grad.
surgery: keeps no example's gradient beyond its own layer, whatever dominates; it takes 0.15 × the
memory of grad.
A Micro optimizer, which takes mean and second_moment at every step, fits in memory here: surgery
takes 13.0 GiB of 20.0 GiB available, 0.15 × grad. Its time is not measured.
"""


@pytest.mark.parametrize(("width", "golden"), [(100, GOLDEN_100), (80, GOLDEN_80)])
def test_the_table_reads_so(width, golden):
    assert terminal.render_terminal(RESULT, width=width) == golden


def test_several_targets_are_a_table_each_and_read_so():
    golden = Path(__file__).with_name("golden_targets.txt").read_text(encoding="utf-8")
    assert terminal.render_terminal(RESULT_ON_TARGETS, width=100) + "\n" == golden


def test_before_anything_is_timed_memory_and_verdict_read_so():
    untimed = tuple(
        dataclasses.replace(row, time_s=None, time_iqr_s=None, time_ratio=None, evidence="compiled")
        for row in RESULT.rows
    )
    assert terminal.render_preview(dataclasses.replace(RESULT, rows=untimed, complete=False)) == GOLDEN_PREVIEW


def test_the_markdown_reads_so():
    assert formats.FORMATS["markdown"](RESULT) == Path(__file__).with_name("golden.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [62, 80, 100])
def test_the_table_fits_its_width_even_with_the_longest_words(width):
    rows = tuple(make_row("microbatch", batch=b, status="refused", reason="w " * 300) for b in (1, 2**20))
    long = dataclasses.replace(RESULT, rows=rows, verdict=dataclasses.replace(RESULT.verdict, target="t" * 30))
    assert max(map(len, terminal.render_terminal(long, width=width).splitlines())) <= width


def test_color_is_added_only_when_asked_for():
    assert "\x1b[" in terminal.render_terminal(RESULT, color=True)
    assert "\x1b[" not in terminal.render_terminal(RESULT)


def test_a_result_prints_as_its_table():
    assert str(RESULT) == GOLDEN_100


def test_a_result_that_is_not_complete_says_so():
    part = dataclasses.replace(RESULT, complete=False)
    for name in ("terminal", "markdown"):
        assert "Not all is measured" in formats.FORMATS[name](part)


def test_several_batches_are_several_tables_and_their_sentences_say_which():
    rows = tuple(dataclasses.replace(row, batch=b) for b in (32, 64) for row in RESULT.rows)
    text = terminal.render_terminal(dataclasses.replace(RESULT, rows=rows))
    assert text.count("method      status") == 2
    assert "Batch 32. A Micro optimizer" in text
    assert "Batch 64. A Micro optimizer" in text


def test_what_many_layers_would_fill_the_screen_with_is_cut_and_said():
    (layer, _) = RESULT.verdict.layers
    many = tuple(dataclasses.replace(layer, name=f"layer {i}", shape=(i + 2, 4)) for i in range(20))
    verdict = dataclasses.replace(RESULT.verdict, layers=many)
    text = terminal.render_terminal(dataclasses.replace(RESULT, verdict=verdict))
    assert "layer 19 " in text
    assert "layer 0 " not in text
    assert text.endswith("and 8 smaller kinds of matrices, which the JSON has")


def test_the_csv_has_exactly_the_columns_of_the_design():
    header, *rows = csv.reader(io.StringIO(formats.render_csv(RESULT)))
    assert header == HEADER.split(",")
    assert [len(row) for row in rows] == [len(header)] * 4


def test_an_unknown_is_an_empty_cell_and_a_known_is_exact():
    grad, _, microbatch, _ = csv.DictReader(io.StringIO(formats.render_csv(RESULT)))
    assert microbatch["time_s"] == microbatch["peak_bytes"] == grad["host_peak_bytes"] == ""
    assert (grad["peak_bytes"], grad["time_s"], grad["activations_dominate"]) == (str(85 * GIB), "10.25", "true")


def test_a_frame_has_the_same_columns():
    frame = RESULT.to_frame()
    assert list(frame.columns) == HEADER.split(",")
    assert list(frame.method) == ["grad", "vmap", "microbatch", "surgery"]


@pytest.mark.parametrize("name", formats.FORMATS)
def test_every_format_renders_a_result_without_numbers(name):
    bare = Result(
        settings=Settings(model="m"), rows=tuple(make_row(m, status="skipped", evidence="compiled") for m in METHODS)
    )
    assert "surgery" in formats.FORMATS[name](bare)


@pytest.mark.parametrize("name", formats.FORMATS)
def test_every_format_renders_a_result_without_rows(name):
    formats.FORMATS[name](Result(settings=Settings(model="m"), rows=()))


def test_markdown_cells_do_not_end_where_a_users_text_has_a_bar():
    row = make_row("grad", model="a|b", reason="one | two\nthree")
    text = formats.FORMATS["markdown"](Result(settings=Settings(model="a|b"), rows=(row,)))
    assert "a\\|b" in text
    assert "- grad: one \\| two three" in text
