"""Numbers as people write them."""

import pytest

from pegprof import units
from pegprof.cli import arguments
from pegprof.errors import PegprofError

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**20 - 1, "1.0 MiB"), (61.3 * 2**30, "61.3 GiB")],
)
def test_bytes_are_shown_in_binary_units(count, text):
    assert units.format_bytes(count) == text


@pytest.mark.parametrize(
    ("time_s", "text"), [(None, "–"), (0.0, "0.0 ns"), (3.2e-5, "32.0 µs"), (0.99996, "1.0 s"), (300, "300 s")]
)
def test_seconds_are_shown_in_the_unit_that_fits(time_s, text):
    assert units.format_seconds(time_s) == text


@pytest.mark.parametrize("text", ["20", "20GX", "20 iB", "lots", "-1GiB", "i", ""])
def test_an_amount_of_memory_that_is_none_is_refused(text):
    with pytest.raises(PegprofError, match="not an amount of memory"):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20G", 20 * 2**30),
        ("20GiB", 20 * 2**30),
        ("20g", 20 * 2**30),
        ("20GB", 20 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("64k", 2**16),
        ("64KB", 64_000),
        ("2T", 2**41),
        ("123B", 123),
    ],
)
def test_a_unit_without_b_or_with_ib_is_binary_and_one_with_b_alone_is_decimal(text, count):
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "time_s"),
    [
        ("90", 90),
        ("90s", 90),
        ("1.5m", 90),
        ("10m", 600),
        ("10min", 600),
        ("1h", 3600),
        ("1h30m", 5400),
        ("1h 5s", 3605),
    ],
)
def test_durations_are_read_with_their_units(text, time_s):
    assert units.parse_duration(text) == time_s
    assert units.parse_duration(units.spell_duration(time_s)) == time_s


@pytest.mark.parametrize("text", ["", "soon", "-5s", "5d", "5s10m", "m", "1e3"])
def test_a_duration_that_is_none_is_refused(text):
    with pytest.raises(PegprofError, match="is not a duration\nhint: write it like 90s, 10m or 1h"):
        units.parse_duration(text)


@pytest.mark.parametrize("text", ["0", "-4", "8,8", "many", "8;16", ""])
def test_a_batch_that_is_none_is_refused(text):
    with pytest.raises(PegprofError):
        arguments.parse_batches(text)


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (arguments.parse_batches, "8,8", "--batch: 8 is named twice"),
        (arguments.parse_batches, "8,08", "the batch size 8 is named twice"),
        (arguments.parse_batches, " ", "--batch: the list is empty"),
        (arguments.parse_stats, "mean,norm,mean", "--stats: mean is named twice"),
        (arguments.parse_stats, "", "--stats: the list is empty"),
    ],
)
def test_a_list_that_is_wrong_is_told_what_is_wrong_with_it(parse, text, words):
    with pytest.raises(PegprofError, match=words):
        parse(text)


def test_an_option_without_a_value_is_refused():
    with pytest.raises(PegprofError, match="--set width has no value"):
        arguments.parse_options(["width"])
