"""What a result ends the command with."""

import pytest

from pegprof.errors import ExitCode
from pegprof.result.result import Result
from pegprof.result.settings import Settings
from tests.result.results import make_row


@pytest.mark.parametrize(
    ("asked", "runs", "code"),
    [
        (None, (3, 3), ExitCode.OK),
        (None, (1, 3), ExitCode.OK),
        (None, (1, 1), ExitCode.TIME_LIMIT),
        (None, (None, 1), ExitCode.TIME_LIMIT),
        (1, (1, 1), ExitCode.OK),
        (1, (None, 1), ExitCode.OK),
        (None, (None, None), ExitCode.TIME_LIMIT),
    ],
)
def test_a_single_run_that_the_time_limit_left_is_no_measurement(asked, runs, code):
    rows = tuple(
        make_row(method, status="ok", time_s=1.0, runs=count) if count else make_row(method, status="skipped")
        for method, count in zip(("grad", "surgery"), runs, strict=True)
    )
    assert Result(settings=Settings(model="m", runs=asked), rows=rows).exit_code == code


def test_what_was_never_to_be_timed_is_fine_without_times():
    assert Result(settings=Settings(model="m", time=False), rows=(make_row("grad"),)).exit_code == ExitCode.OK
