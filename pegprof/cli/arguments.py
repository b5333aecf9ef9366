"""What people type, to what Settings hold: "8,16", "grad,vmap", "width=64"."""

from collections.abc import Iterable

from pegprof.errors import PegprofError
from pegprof.result.settings import check_batches, check_methods, find_double
from pegprof.result.steps import choose_stats
from pegprof.targets import meshes
from pegprof.units import parse_bytes, parse_duration


def parse_names(text: str, flag: str = "") -> tuple[str, ...]:
    """
    >>> parse_names("grad, vmap")
    ('grad', 'vmap')
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise PegprofError("the list is empty", where=flag, hint="name at least one, and separate several by commas")
    if twice := find_double(names):
        raise PegprofError(f"{twice} is named twice", where=flag, hint="name each once")
    return names


def parse_targets(text: str | None) -> tuple[str, ...]:
    """
    >>> parse_targets("cpu,h100"), parse_targets(None)
    (('cpu', 'h100'), ())
    """
    return () if text is None else parse_names(text, "--target")


def parse_one_target(text: str | None) -> tuple[str, ...]:
    """
    >>> parse_one_target("h100")
    ('h100',)
    """
    names = parse_targets(text)
    if len(names) > 1:
        raise PegprofError(f"fit takes one target, and {text} are {len(names)}", hint="ask about one after the other")
    return names


def is_auto(mesh: str | None) -> bool:
    """
    >>> is_auto("auto"), is_auto("data=8"), is_auto(None)
    (True, False, False)
    """
    return mesh is not None and mesh.strip() == meshes.AUTO


def parse_mesh(text: str | None) -> dict[str, int]:
    """
    >>> parse_mesh("data=16,fsdp=4"), parse_mesh(None)
    ({'data': 16, 'fsdp': 4}, {})
    """
    return {} if text is None else meshes.parse_mesh(text)


def parse_methods(text: str) -> tuple[str, ...]:
    """
    >>> parse_methods("grad,vmap")
    ('grad', 'vmap')
    """
    return check_methods(parse_names(text, "--methods"), where="--methods")


def parse_stats(text: str | None, step: str | None = None) -> tuple[str, ...]:
    """
    >>> parse_stats("mean,norm"), parse_stats(None), parse_stats(None, step="adam")
    (('mean', 'norm'), ('mean', 'second_moment'), ('mean',))
    """
    return choose_stats(None if text is None else parse_names(text, "--stats"), step, where="--stats")


def parse_time_limit(text: str) -> float:
    """
    >>> parse_time_limit("10m")
    600.0
    """
    limit_s = parse_duration(text)
    if limit_s < 1:
        raise PegprofError(f"--time-limit {text} is less than a second", hint="write it like 90s, 10m or 1h")
    return limit_s


def parse_memory_limit(text: str | None) -> int | None:
    """
    >>> parse_memory_limit("2KiB"), parse_memory_limit(None)
    (2048, None)
    """
    return None if text is None else parse_bytes(text)


def parse_batches(text: str) -> tuple[int, ...]:
    """
    >>> parse_batches("8,16")
    (8, 16)
    """
    names = parse_names(text, "--batch")
    if not all(name.isdecimal() and name.isascii() for name in names):
        raise PegprofError(f"{text!r} is not a batch size", hint="write it like 64, or 8,16,32 for several")
    return check_batches(int(name) for name in names)


def parse_options(pairs: Iterable[str], **named: object) -> dict[str, object]:
    """What ``--set`` gives, and the options that have a flag of their own, which is None where it was not given.

    >>> parse_options(["width=64"], seq_len=128, dtype=None)
    {'width': '64', 'seq_len': 128}
    """
    options: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise PegprofError(f"--set {pair} has no value", hint="write it like --set width=64")
        if key.strip() in options:
            raise PegprofError(f"--set gives {key.strip()} twice", hint="leave one of them out")
        options[key.strip()] = value
    flags = {key: flag for key, flag in named.items() if flag is not None}
    for key, flag in flags.items():
        if str(options.get(key, flag)) != str(flag):
            what = f"--{key.replace('_', '-')} {flag} and --set {key}={options[key]} contradict each other"
            raise PegprofError(what, hint="leave one of them out")
    return options | flags
