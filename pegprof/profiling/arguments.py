"""What people type, to what Settings hold: "8,16", "grad,vmap", "width=64"."""

from collections.abc import Iterable

from pegprof.errors import PegprofError


def parse_names(text: str) -> tuple[str, ...]:
    """
    >>> parse_names("grad, vmap")
    ('grad', 'vmap')
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or len(set(names)) != len(names):
        raise PegprofError(f"{text!r} is not a list of different names", hint="separate them by commas")
    return names


def parse_batches(text: str) -> tuple[int, ...]:
    """
    >>> parse_batches("8,16")
    (8, 16)
    """
    names = parse_names(text)
    if not all(name.isdecimal() and int(name) > 0 for name in names):
        raise PegprofError(f"{text!r} is not a batch size", hint="write it like 64, or 8,16,32 for several")
    return tuple(int(name) for name in names)


def parse_options(pairs: Iterable[str], seq_len: int | None = None) -> dict[str, object]:
    """
    >>> parse_options(["width=64"], seq_len=128)
    {'width': '64', 'seq_len': 128}
    """
    options: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise PegprofError(f"--set {pair} has no value", hint="write it like --set width=64")
        options[key.strip()] = value
    return options if seq_len is None else {**options, "seq_len": seq_len}
