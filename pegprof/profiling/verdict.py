"""Do activations dominate parameters? The paper's condition for per-example statistics to be cheap in memory.

The activations of one example are the slope of the plain gradient's temporaries between two batch sizes, in XLA's own
buffer assignment for the target. The two sizes are fixed, so that the verdict does not depend on the batch asked for;
below 16 examples XLA still chooses other layouts, and the slope wavers by a fifth.
"""

import dataclasses

from pegprof.profiling.units import format_bytes

SLOPE_BATCHES = (16, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The bytes that the activations of one example and the parameters take on a target.

    ``traced_bytes_per_example`` is what the backward pass keeps by the trace alone, before XLA shares and recomputes
    anything: an upper bound.
    """

    target: str
    activation_bytes_per_example: int
    parameter_bytes: int
    traced_bytes_per_example: int | None = None

    @property
    def activations_dominate(self) -> bool:
        return self.activation_bytes_per_example >= self.parameter_bytes

    def __str__(self) -> str:
        who, verb = ("Activations", "at least") if self.activations_dominate else ("Parameters", "less than")
        sentence = (
            f"{who} dominate: on {self.target} one example takes {format_bytes(self.activation_bytes_per_example)} of "
            f"activations, {verb} the {format_bytes(self.parameter_bytes)} of the parameters."
        )
        if self.traced_bytes_per_example is None:
            return sentence
        return f"{sentence} The trace alone would keep {format_bytes(self.traced_bytes_per_example)}."


def slope(temp_bytes: tuple[int, int], batches: tuple[int, int] = SLOPE_BATCHES) -> int:
    """Bytes for each further example; XLA's padding can make that negative for a model without activations.

    >>> slope((1000, 1160), (16, 32))
    10
    """
    return max(0, (temp_bytes[1] - temp_bytes[0]) // (batches[1] - batches[0]))
