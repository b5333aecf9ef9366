"""How many examples are timed, and which methods: as much as the limits of time and memory allow.

All methods are timed at one common batch. First every method runs once at a small batch, the probe, which is 4 if at
all possible, or more if that costs nothing; from that follows what any other batch would take:

    the batch asked for, if all fit ──> else its largest halving, with 3 runs each ──> else the probe, where the first
    runs are done already ──> else without the slowest

Pure arithmetic: what is known goes in, a choice comes out.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from pegprof.result.settings import MIN_RUNS

PROBE = 4  # examples: fewer say little of what a batch costs, and check_examples takes as many
LEAST_PROBE = 2  # one example has no statistics to speak of
NOTHING_S = 1.0  # by a count of flops; methods have been seen to take a hundred times as long


def candidate_batches(batch: int, *, minimum: int, multiple_of: int) -> list[int]:
    """The batch asked for and its halvings, as far down as statistics are defined and microbatches whole.

    >>> candidate_batches(64, minimum=2, multiple_of=8)
    [64, 32, 16, 8]
    """
    halvings = [batch]
    while halvings[-1] > 1:
        halvings.append(halvings[-1] // 2)
    return [b for b in halvings if b >= minimum and b % multiple_of == 0] or [batch]


def choose_probe(batches: Sequence[int], *, example_s: float | None, left_s: float) -> int:
    """The batch at which every method runs first: the smallest of at least 4, or fewer if that would take too long.

    Where the batch asked for takes next to nothing, it is that one: then nothing is compiled twice.

    Args:
      batches: the candidates, largest first.
      example_s: what one example should take, all methods together; None if nobody knows.
      left_s: the time that is left.

    >>> choose_probe([64, 32, 16, 8, 4, 2, 1], example_s=30.0, left_s=500.0)
    4
    >>> choose_probe([64, 32, 16, 8, 4, 2, 1], example_s=0.001, left_s=500.0)
    64
    >>> choose_probe([64, 32, 16, 8, 4, 2, 1], example_s=60.0, left_s=500.0)
    2
    """
    if example_s is not None and batches[0] * example_s <= NOTHING_S:
        return batches[0]
    probe = min((b for b in batches if b >= PROBE), default=batches[0])
    least = min((b for b in batches if b >= LEAST_PROBE), default=batches[-1])
    for batch in batches:
        if least <= batch <= probe and (example_s is None or MIN_RUNS * batch * example_s <= left_s):
            return batch
    return least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entrant:
    """What is known of a method after its first run at the probe."""

    time_s: float  # of that run
    compile_s: float
    probe_bytes: int  # that it needs at the probe
    full_bytes: int  # and at the batch asked for

    def bytes_at(self, batch: int, *, probe: int, full: int) -> int:
        """Both are XLA's own figures; in between, needs are nearly linear in the batch."""
        share = (batch - probe) / max(full - probe, 1)
        return int(self.probe_bytes + share * (self.full_bytes - self.probe_bytes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The batch that is timed, and the methods that are left out, for want of time."""

    batch: int
    left_out: tuple[str, ...] = ()


def choose(
    entrants: Mapping[str, Entrant],
    batches: Sequence[int],
    *,
    probe: int,
    full: int,
    left_s: float,
    warmup: int,
    runs: int | None,
    has_room: Callable[[str, int], bool],
) -> Choice:
    """The largest batch that all methods can be timed at, and at the probe who has to be left out.

    Args:
      entrants: the methods that ran, by name.
      batches: the candidates, largest first.
      probe: where they ran.
      full: the batch asked for.
      left_s: the time that is left.
      warmup: runs that do not count.
      runs: runs that count; None if that is left to us.
      has_room: whether a method that needs so many bytes may run.
    """
    least_runs = min(runs or MIN_RUNS, MIN_RUNS)
    probe_s = {name: entrant.time_s for name, entrant in entrants.items()}
    compile_s = sum(entrant.compile_s for entrant in entrants.values())
    for batch in batches:
        round_s = sum(probe_s.values()) * batch / probe
        enough_time = compile_s + (warmup + least_runs) * round_s <= left_s
        enough_room = all(has_room(name, e.bytes_at(batch, probe=probe, full=full)) for name, e in entrants.items())
        if batch > probe and enough_time and enough_room:
            return Choice(batch=batch)
    # There the first runs are done. Where time is short, they count among those asked for.
    return Choice(batch=probe, left_out=_slowest(probe_s, rounds=least_runs - 1, left_s=left_s))


def _slowest(times_s: Mapping[str, float], *, rounds: int, left_s: float) -> tuple[str, ...]:
    """The methods without which so many rounds fit, slowest first. Never ``grad``: all else is compared with it.

    If not even two methods fit, nobody is left out: then all of them have their first run, and that is all.

    >>> _slowest({"grad": 10.0, "vmap": 30.0, "surgery": 12.0}, rounds=2, left_s=50.0)
    ('vmap',)
    """
    kept = dict(sorted(times_s.items(), key=lambda item: (item[0] != "grad", item[1])))
    left_out = []
    while len(kept) > 2 and rounds * sum(kept.values()) > left_s:
        left_out.append(kept.popitem()[0])
    return tuple(left_out) if rounds * sum(kept.values()) <= left_s else ()
