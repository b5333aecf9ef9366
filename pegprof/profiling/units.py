"""Numbers as people write them, and back: bytes, seconds, counts. An unknown is shown as "–", never as 0."""

import re

from pegprof.errors import PegprofError

UNKNOWN = "–"

_BYTE_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_TIME_UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_COUNT_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


def format_bytes(count: float | None) -> str:
    """
    >>> format_bytes(3 * 2**30), format_bytes(None)
    ('3.0 GiB', '–')
    """
    return _scaled(count, _BYTE_UNITS, decimals=1)


def format_seconds(time_s: float | None) -> str:
    """
    >>> format_seconds(0.0123), format_seconds(71.4)
    ('12.3 ms', '71.4 s')
    """
    return _scaled(time_s, _TIME_UNITS, decimals=1)


def format_duration(time_s: float) -> str:
    """A time to wait for, no finer than a person cares.

    >>> format_duration(0.4), format_duration(8.31), format_duration(119.6), format_duration(3600)
    ('1 s', '8 s', '2 min', '60 min')
    """
    whole = max(1, round(time_s))
    return f"{whole} s" if whole < 100 else f"{round(whole / 60)} min"


def format_count(count: float | None) -> str:
    """
    >>> format_count(184_415_232), format_count(12)
    ('184.4 M', '12')
    """
    return _scaled(count, _COUNT_UNITS, decimals=1)


def format_ratio(ratio: float | None) -> str:
    """
    >>> format_ratio(1.5), format_ratio(31.24), format_ratio(492.46), format_ratio(None)
    ('1.50', '31.2', '492', '–')
    """
    if ratio is None:
        return UNKNOWN
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"


def parse_bytes(text: str) -> int:
    """
    >>> parse_bytes("1.5GiB") == 3 * 2**29 == parse_bytes("1536 MiB")
    True
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B)", text.strip())
    if not match:  # nor is a number without a unit: who writes 20 does not mean bytes
        raise PegprofError(f"{text!r} is not an amount of memory", hint="write it like 20GiB or 512MiB, with its unit")
    return int(float(match[1]) * _BYTE_UNITS[match[2]])


def _scaled(number: float | None, units: dict[str, float] | dict[str, int], *, decimals: int) -> str:
    if number is None:
        return UNKNOWN
    # 1023.96 KiB would be shown as "1024.0 KiB": choose the unit by what is shown.
    shown = number * (1 + 0.5 * 10 ** -(decimals + 3))
    unit, size = max(((u, s) for u, s in units.items() if shown >= s), key=lambda pair: pair[1], default=_least(units))
    exact = size == 1 and float(number).is_integer()
    return f"{number / size:.{0 if exact else decimals}f} {unit}".rstrip()


def _least(units: dict[str, float] | dict[str, int]) -> tuple[str, float]:
    return min(units.items(), key=lambda pair: pair[1])
