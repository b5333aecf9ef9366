"""The experiment on memory: which steps are profiled, and what their bytes are taken to say."""

import pytest

from pegprof.experiments.memory_baseline import draw, judge, make_runs

GIB = 2**30


def rows(target, *, vmap=1.0, surgery=1.0, times=(None, None)):
    """Three ways on one target; the numbers are ratios to Adam's."""
    common = {
        "target": target,
        "batch": 64,
        "activations_dominate": True,
        "activation_bytes_per_example": 400 * 2**20,
        "parameter_bytes": 700 * 2**20,
        "host_peak_bytes": None,
        "time_batch": 4,
    }
    ratios = {"grad": (1.0, 1.0), "vmap": (vmap, times[0]), "surgery": (surgery, times[1])}
    return [
        {
            **common,
            "method": method,
            "peak_bytes": int(30 * GIB * ratio),
            "temp_bytes": int(28 * GIB * ratio),
            "time_ratio": time,
        }
        for method, (ratio, time) in ratios.items()
    ]


def verdicts(found):
    return [finding.verdict for finding in judge({"memory": found})]


def test_each_device_is_compiled_for_and_the_cpu_is_measured():
    names = [run.name for run in make_runs(False, {})]
    assert names == ["compiled-tpu-v5p", "compiled-h100", "measured-cpu"]
    assert {run.settings["model"] for run in make_runs(False, {})} == {"transformer-151m"}


def test_a_ratio_of_bytes_up_to_one_in_twenty_counts_as_no_more():
    assert verdicts(rows("h100", vmap=1.04, surgery=0.9)) == ["agrees", "agrees", "agrees"]
    assert verdicts(rows("h100", vmap=1.06, surgery=1.2)) == ["agrees", "disagrees", "disagrees"]


def test_what_was_measured_is_in_words():
    finding = judge({"memory": rows("h100", vmap=1.5)})[1]
    assert finding.measured == "h100, batch 64: 45.0 GiB against 30.0 GiB, 1.50x; temporaries 1.50x"


@pytest.mark.parametrize(
    ("times", "judged"),
    [((1.2, 1.0), ["agrees", "agrees"]), ((1.8, 0.9), ["disagrees", "agrees"]), ((None, 1.2), ["disagrees"])],
)
def test_time_is_judged_where_something_was_run(times, judged):
    assert verdicts(rows("cpu", times=times)) == verdicts(rows("cpu")) + judged


def test_a_bar_for_each_way_on_each_target():
    figure = draw({"memory": rows("h100") + rows("tpu-v5p")})["memory"]
    assert [axes.get_title() for axes in figure.axes] == ["h100, batch 64", "tpu-v5p, batch 64"]
    assert figure.axes[0].get_xticklabels()[0].get_text() == "Adam"
