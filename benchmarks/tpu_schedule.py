"""A kernel's schedule, as the TPU's compiler writes it down: how many bundles one step of its grid executes.

A core issues one bundle of instructions a cycle. ``*-final_bundles.txt`` lists them, in nested loops:

    0x1058 PF: > { ... } /* Start/End empty region 44 */
    0x1059 LB: >> { ... %p1 = scmp.ge.s32.totalorder %s4, 8 /* loop exit test */ } /* Start region 134 */
    0x1832   : >> { ... sbr.rel (!%p1) target = $region134 }

The outermost loop runs over the grid. A branch back ends a loop; its body runs as often as the exit test says. A branch
forward skips what runs at some steps only. The kernel zeroes its states at the first example and finishes them at the
last: parts that are skipped and multiply nothing are taken for these and left out.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

DELAY = 4
"""How many bundles after a branch run before it is taken."""

_START = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\s+(?:L[HBE]|P[BF]|CT)?\s*:\s*>*\s*\{")
_BRANCH = re.compile(r"sbr\.rel \(!?(%p\w+)\) target = \$region(\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_TRIPS = re.compile(r"(%p\w+) = scmp\.ge\.s32\.totalorder [^;]*?, (\d+) /\* loop exit test \*/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A kernel's bundles.

    Args:
      bundles: the text of each.
      runs: how often each is executed in one step of the grid.
    """

    bundles: Sequence[str]
    runs: Sequence[int]

    @property
    def executed(self) -> int:
        """How many bundles one step executes: its cycles, if nothing is waited for."""
        return sum(self.runs)

    def utilization(self, text: str) -> dict[str, float]:
        """How busy each kind of unit is in a step, from ``*-final_hlo-static-per-bundle-utilization.txt``."""
        _, names, capacities, _, *rows = text.splitlines()
        used = [0] * len(names.split(","))
        for times, row in zip(self.runs, rows, strict=True):
            used = [total + times * int(n) for total, n in zip(used, row.split(), strict=True)]
        capacity = [int(n) * self.executed for n in capacities.split()]
        return {name.strip(): n / m for name, n, m in zip(names.split(","), used, capacity, strict=True)}


def parse_schedule(text: str) -> Schedule:
    """The schedule of a kernel, from ``*-final_bundles.txt``."""
    bundles = list(_split(text))
    starts = {int(n): i for i, bundle in enumerate(bundles) for n in _REGION.findall(bundle)}
    branches = {i: starts[int(found[2])] for i, bundle in enumerate(bundles) if (found := _BRANCH.search(bundle))}
    loops = {first: last for last, first in branches.items() if first <= last}
    runs = [0] * len(bundles)
    if loops:
        grid = min(loops)
        _count(bundles, branches, loops, grid, loops.pop(grid), 1, runs)
    return Schedule(bundles=bundles, runs=runs)


def _split(text: str) -> Iterator[str]:
    """One bundle after the other; comments may have lines of their own."""
    lines: list[str] = []
    for line in text.splitlines():
        if _START.match(line):
            if lines:
                yield "\n".join(lines)
            lines = [line]
        elif lines:
            lines.append(line)
    yield "\n".join(lines)


def _count(
    bundles: Sequence[str],
    branches: Mapping[int, int],
    loops: Mapping[int, int],
    first: int,
    last: int,
    times: int,
    runs: list[int],
) -> None:
    """Adds to ``runs`` what the body of a loop executes, which ends DELAY bundles after the branch ``last``."""
    i, end = first, last + DELAY
    while i <= end:
        if i in loops:
            inner = {start: stop for start, stop in loops.items() if start != i}
            _count(bundles, branches, inner, i, loops[i], times * _trips(bundles[i : loops[i] + 1]), runs)
            i = loops[i] + DELAY + 1
            continue
        runs[i] += times
        after = branches.get(i, 0)
        if i + DELAY < after <= end and not any("vmatmul" in bundle for bundle in bundles[i:after]):
            runs[i + 1 : i + DELAY + 1] = [n + times for n in runs[i + 1 : i + DELAY + 1]]
            i = after
        else:
            i += 1


def _trips(bundles: Sequence[str]) -> int:
    """How often a loop runs, which counts from zero, by the test that the branch at its end depends on."""
    tests = {name: int(n) for bundle in bundles for name, n in _TRIPS.findall(bundle)}
    (predicate, _), *_ = _BRANCH.findall(bundles[-1])
    return tests[predicate]
