"""What people and programs read, from a fixed Result."""

import csv
import io

import pytest

from pegprof.profiling import report
from pegprof.profiling.result import METHODS, Result, Row, Settings
from pegprof.profiling.verdict import Verdict

# The contract with everyone who reads the files: more columns may follow, these stay.
HEADER = (
    "model,parameters,batch,seq_len,dtype,stats,method,microbatch_size,target,device,evidence,status,reason,"
    "time_s,time_iqr_s,time_batch,runs,time_ratio,compile_s,peak_bytes,argument_bytes,output_bytes,temp_bytes,"
    "alias_bytes,host_peak_bytes,peak_ratio,capacity_bytes,flops,activation_bytes_per_example,parameter_bytes,"
    "activations_dominate,max_rel_error,materialised_parameters,seed,pegprof,jax,jaxlib,xla_flags,timestamp"
)

GIB = 2**30


def _row(method, **fields):
    common = dict(
        model="transformer-151m",
        parameters=184_415_232,
        batch=64,
        seq_len=512,
        dtype="float32",
        stats="mean,second_moment",
        method=method,
        target="cpu",
        device="Some Processor, 2 cores",
        evidence="measured",
        status="ok",
        capacity_bytes=20 * GIB,
        parameter_bytes=int(0.69 * GIB),
        activation_bytes_per_example=int(1.31 * GIB),
        activations_dominate=True,
        seed=0,
    )
    return Row(**{**common, **fields})


@pytest.fixture
def result():
    rows = (
        _row(
            "grad",
            status="refused",
            reason="needs 85.0 GiB, 20.0 GiB available; timed at batch 2",
            time_s=10.25,
            time_iqr_s=0.31,
            time_batch=2,
            runs=3,
            time_ratio=1.0,
            peak_bytes=85 * GIB,
            peak_ratio=1.0,
            flops=41_300_000_000_000,
            max_rel_error=2.1e-6,
        ),
        _row(
            "vmap",
            status="failed",
            evidence="compiled",
            reason="killed by SIGKILL, as the system does when memory runs out; over bare examples, [as they are]",
        ),
        _row(
            "microbatch",
            microbatch_size=1,
            reason="1 at a time, over bare examples; timed at batch 2",
            time_s=9.5,
            time_iqr_s=0.0123,
            time_batch=2,
            runs=3,
            time_ratio=0.9268,
            peak_bytes=int(3.75 * GIB),
            peak_ratio=0.0441,
            flops=41_500_000_000_000,
        ),
    )
    verdict = Verdict(
        target="cpu",
        activation_bytes_per_example=int(1.31 * GIB),
        parameter_bytes=int(0.69 * GIB),
        traced_bytes_per_example=int(1.65 * GIB),
    )
    return Result(settings=Settings(model="transformer-151m"), rows=rows, verdict=verdict)


GOLDEN = """\
transformer-151m: 184.4 M parameters, seq_len 512, float32, batch 64, mean second_moment
cpu: Some Processor, 2 cores, 20.0 GiB available
method       status    time (batch 2)        IQR   × grad   peak memory   × grad    flops   error
─────────────────────────────────────────────────────────────────────────────────────────────────
grad         refused           10.2 s   310.0 ms     1.00      85.0 GiB     1.00   41.3 T   2e-06
vmap         failed                 –          –        –             –        –        –       –
microbatch   ok                 9.5 s    12.3 ms     0.93       3.8 GiB     0.04   41.5 T       –
grad: needs 85.0 GiB, 20.0 GiB available; timed at batch 2
vmap: killed by SIGKILL, as the system does when memory runs out; over bare examples, [as they are]
microbatch: 1 at a time, over bare examples; timed at batch 2

Activations dominate: on cpu one example takes 1.3 GiB of activations, at least the 706.6 MiB of the
parameters. The trace alone would keep 1.6 GiB."""


def test_the_table_reads_so(result):
    assert report.render_terminal(result) == GOLDEN


def test_the_table_fits_100_columns_even_with_the_longest_words(result):
    long = Result(
        settings=result.settings, rows=tuple(_row("microbatch", status="refused", reason="w " * 300) for _ in "ab")
    )
    assert max(map(len, report.render_terminal(long).splitlines())) <= 100


def test_color_is_added_only_when_asked_for(result):
    assert "\x1b[" in report.render_terminal(result, color=True)
    assert "\x1b[" not in report.render_terminal(result)


def test_the_csv_has_exactly_the_columns_of_the_design(result):
    header, *rows = csv.reader(io.StringIO(report.render_csv(result)))
    assert header == HEADER.split(",")
    assert [len(row) for row in rows] == [len(header)] * 3


def test_an_unknown_is_an_empty_cell_and_a_known_is_exact(result):
    grad, vmap, _ = csv.DictReader(io.StringIO(report.render_csv(result)))
    assert vmap["time_s"] == vmap["peak_bytes"] == grad["host_peak_bytes"] == ""
    assert (grad["peak_bytes"], grad["time_s"], grad["activations_dominate"]) == (str(85 * GIB), "10.25", "true")


def test_a_frame_has_the_same_columns(result):
    frame = result.to_frame()
    assert list(frame.columns) == HEADER.split(",")
    assert list(frame.method) == ["grad", "vmap", "microbatch"]


def test_every_format_renders_a_result_without_numbers():
    bare = Result(
        settings=Settings(model="m"), rows=tuple(_row(m, status="skipped", evidence="compiled") for m in METHODS)
    )
    for name, render in report.FORMATS.items():
        assert "surgery" in render(bare), name
