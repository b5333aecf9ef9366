"""Remarks: what there is to say of a row, as data. Text is made of them at the very end."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Kind = Literal[
    "failed",  # it crashed, or is wrong
    "refused",  # it does not fit
    "skipped",  # there was no time for it
    "method",  # how the method goes about it
    "compiler",
    "pending",  # not measured yet
    "batch",  # timed at another one
    "runs",  # fewer than asked for
    "spread",  # of the times
    "peak",  # measured, far from XLA's
    "statistics",  # not compared, not finite, or compared more than once
    "examples",  # they interact, or could not be checked
    "other",  # of an older file, which did not say
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remark:
    """Something to know of a row.

    Args:
      kind: what it is about.
      words: the remark, without a full stop.
      advice: what to do about it.
    """

    kind: Kind
    words: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.words}: {self.advice}" if self.advice else self.words


def join(remarks: Sequence[Remark]) -> str:
    """One text, as the column ``reason`` has it.

    >>> join([Remark(kind="batch", words="timed at batch 4"), Remark(kind="spread", words="unsteady", advice="wait")])
    'timed at batch 4; unsteady: wait'
    """
    return "; ".join(map(str, remarks))
