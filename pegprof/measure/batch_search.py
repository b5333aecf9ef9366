"""The largest batch that fits, in few compiles: a function that tries a batch in, the edge out.

Needs are nearly linear in the batch, so a line through two of them foretells where it meets the capacity. Only real
compiles decide: the answer is a batch that fits while the next one does not. A batch that does not fit is tried first,
since a TPU's compiler refuses in seconds what takes it minutes to compile.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

PATIENCE = 8
"""After so many tries the line has shown itself to be none, and the search halves what is left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Try:
    """What became of a batch: the bytes that it needs, where known, and whether that fits."""

    fits: bool
    needs_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edge:
    """Between the largest batch that was seen to fit and the smallest that was seen not to.

    Args:
      largest: None if none fits.
      refused: None if none was found.
      is_exact: whether no batch between them is left to try.
    """

    largest: int | None
    refused: int | None
    is_exact: bool


def find_edge(
    attempt: Callable[[int], Try | None],
    *,
    capacity_bytes: int,
    starts: Sequence[int],
    step: int,
    least: int = 1,
    most: int,
) -> Edge:
    """Searches among the multiples of ``step`` up to ``most``.

    Args:
      attempt: tries a batch; None means that there is no time left.
      capacity_bytes: what there is.
      starts: the batches that are tried first, one after the other, as far as they are still in question.
      step: what batches are multiples of.
      least: the smallest of interest.
      most: the largest.
    """
    first, last = -(-least // step), max(1, most // step)
    tries: dict[int, Try] = {}  # by the number of steps
    fitting, refused = first - 1, last + 1
    to_try = [min(max(first, start // step), last) for start in starts]
    while refused - fitting > 1:
        to_try = [n for n in to_try if fitting < n < refused]
        guess = to_try.pop(0) if to_try else _guess_next(tries, fitting, refused, capacity_bytes)
        outcome = attempt(guess * step)
        if outcome is None:
            break
        tries[guess] = outcome
        if outcome.fits:
            fitting = guess
        else:
            refused = guess
    return Edge(
        largest=fitting * step if fitting >= first else None,
        refused=refused * step if refused <= last else None,
        is_exact=refused - fitting == 1,
    )


def _guess_next(tries: Mapping[int, Try], fitting: int, refused: int, capacity_bytes: int) -> int:
    """Some number strictly between the two: just above the foretold edge or, where that is wrong, in the middle."""
    foretold = _foretell(tries, capacity_bytes) if len(tries) < PATIENCE else None
    if foretold is None or foretold < fitting:
        return min((fitting + refused + 1) // 2, refused - 1)
    return int(min(foretold + 1, refused - 1))


def _foretell(tries: Mapping[int, Try], capacity_bytes: int) -> float | None:
    """Where the line through two of the needs meets the capacity; infinity if it never does.

    What does not fit has been squeezed already, and what fits easily has not: two of the former, if there are two.
    """
    known = {n: outcome.needs_bytes for n, outcome in tries.items() if outcome.needs_bytes is not None}
    above = sorted(n for n in known if not tries[n].fits)[:2]
    below = sorted((n for n in known if tries[n].fits), reverse=True)[:2]
    points = above if len(above) == 2 else sorted((*below[: 2 - len(above)], *above))
    if not points:
        return None
    if len(points) == 1:
        (n,) = points
        return n * capacity_bytes // known[n] if known[n] else None
    first, second = points
    slope = (known[second] - known[first]) / (second - first)
    if slope <= 0:
        return float("inf")
    return (capacity_bytes - known[first]) // slope + first
