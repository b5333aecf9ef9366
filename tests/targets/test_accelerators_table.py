"""The table of estimates: ratios before and after, what was refused, and what nobody compiled."""

from benchmarks import accelerators_table as table

RATIOS = ("time_ratio", "bytes_ratio", "temp_ratio")
NAMES = ("microbatch", "time_s", "floor_s", "bytes_moved", "temp_bytes", "kernels", *RATIOS)


def row(method, *, label="after", status="ok", target="tpu-v5p", **figures):
    about = dict(model="transformer-151m", options="dtype=float32", dtype="float32", batch="64", target=target)
    return {**dict.fromkeys(NAMES, ""), **about, "method": method, "label": label, "status": status, **figures}


ROWS = [
    row("grad", time_ratio="1.0", bytes_ratio="1.0", temp_ratio="1.0"),
    row("vmap", time_ratio="1.674", bytes_ratio="1.52", temp_ratio="1.05"),
    row("surgery", label="before", time_ratio="2.097", bytes_ratio="1.83", temp_ratio="1.02"),
    row("surgery", time_ratio="1.037", bytes_ratio="1.1", temp_ratio="", kernels="74", time_s="0.24656"),
    row("vmap", target="tpu-v5e", status="refused"),
]


def test_a_line_has_vmap_and_surgery_before_and_now():
    assert "| transformer-151m | float32 | tpu-v5p | 64 | 1.67 | 2.10 | 1.04 |" in table.render(ROWS)


def test_what_does_not_fit_is_refused_and_what_is_not_there_is_a_dash():
    assert "| transformer-151m | float32 | tpu-v5e | 64 | refused | – | – |" in table.render(ROWS)
    assert table.summary(ROWS).splitlines()[-1] == "| `tpu-v5p` | 1.67 | 1.04 | 1.52 | 1.10 | 1.05 | – |"


def test_absolute_figures_have_units_and_kernels_are_counted():
    assert "| surgery | 246.6 | – | – | – | – | 74 |" in table.render(ROWS)
