"""Numbers as people write them, and back: bytes, seconds, counts. An unknown is shown as "–", never as 0."""

import re

from pegprof.errors import PegprofError

UNKNOWN = "–"

_BYTE_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL_BYTE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_DURATION_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
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
    """An amount of memory, with the units of GNU's tools: G and GiB are 2³⁰ bytes, GB is 10⁹; case does not matter.

    >>> parse_bytes("1.5GiB") == 3 * 2**29 == parse_bytes("1536 MiB") == parse_bytes("1.5g")
    True
    >>> parse_bytes("20GB")
    20000000000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b)?|b)", text.strip(), re.IGNORECASE)
    if not match:  # nor is a number without a unit: who writes 20 does not mean bytes
        hint = "write a number and a unit: 20G or 20GiB (2^30 bytes each), 20GB (10^9), 512M"
        raise PegprofError(f"{text!r} is not an amount of memory", hint=hint)
    number, prefix, suffix = match[1], (match[2] or "").upper(), (match[3] or "").lower()
    size = _DECIMAL_BYTE_UNITS[f"{prefix}B"] if suffix == "b" else _BYTE_UNITS[f"{prefix}iB" if prefix else "B"]
    return int(float(number) * size)


def parse_duration(text: str) -> float:
    """A time in seconds, from what a person writes.

    >>> parse_duration("90"), parse_duration("90s"), parse_duration("10m"), parse_duration("1.5h")
    (90.0, 90.0, 600.0, 5400.0)
    >>> parse_duration("1h30m")
    5400.0
    """
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"(?:{number}\s*h)?\s*(?:{number}\s*m(?:in)?)?\s*(?:{number}\s*s?)?", text.strip())
    if not (match and any(match.groups())):
        raise PegprofError(f"{text!r} is not a duration", hint="write it like 90s, 10m or 1h; a bare 90 is seconds")
    return sum(float(part or 0) * size for part, size in zip(match.groups(), _DURATION_UNITS.values(), strict=True))


def spell_duration(time_s: float) -> str:
    """A duration as ``parse_duration`` reads it, in whole minutes where that loses nothing.

    >>> spell_duration(585), spell_duration(600), spell_duration(7200), spell_duration(0.5)
    ('585s', '10m', '2h', '0.5s')
    """
    unit = next(unit for unit, size in _DURATION_UNITS.items() if time_s % size == 0 or unit == "s")
    return f"{time_s / _DURATION_UNITS[unit]:g}{unit}"


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
