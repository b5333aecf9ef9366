"""Do activations dominate parameters? The paper's condition for per-example statistics to be cheap in memory.

The activations of one example are the slope of the plain gradient's temporaries between two batch sizes, in XLA's own
buffer assignment for the target. The two sizes are fixed, so that the verdict does not depend on the batch asked for;
below 16 examples XLA still chooses other layouts, and the slope wavers by a fifth.

Beside it stand two witnesses who know nothing of XLA: the count of what the backward pass keeps, from the trace
(``engine/kept.py``), and the paper's rule T ≥ D, layer by layer. Where they disagree, ``explain.py`` says so.
"""

import dataclasses

from pegprof.profiling.layers import Layer
from pegprof.profiling.units import format_bytes

SLOPE_BATCHES = (16, 32)
TRACED_BATCH = 2  # what is kept of the examples is counted on a batch; of one, a loss may do without


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The bytes that the activations of one example and the parameters take on a target.

    ``traced_bytes_per_example`` is what the backward pass keeps by the trace alone, before XLA fuses and recomputes
    anything. ``layers`` are the model's matrices, none where the model could not be planned.
    """

    target: str
    activation_bytes_per_example: int
    parameter_bytes: int
    traced_bytes_per_example: int | None = None
    layers: tuple[Layer, ...] = ()

    @property
    def activations_dominate(self) -> bool:
        return dominate(self.activation_bytes_per_example, self.parameter_bytes)

    @property
    def trace_says(self) -> bool | None:
        """Whether activations dominate by the trace's count."""
        traced = self.traced_bytes_per_example
        return None if traced is None else traced >= self.parameter_bytes

    @property
    def rule_share(self) -> float | None:
        """The part of the matrices' parameters that are in layers with T ≥ D, among those whose T and D are known."""
        known = [layer for layer in self.layers if layer.obeys_rule is not None]
        total = sum(layer.parameters for layer in known)
        return sum(layer.parameters for layer in known if layer.obeys_rule) / total if total else None

    @property
    def rule_says(self) -> bool | None:
        """Whether activations dominate by the paper's rule: where most of the parameters are, T ≥ D."""
        return None if self.rule_share is None else self.rule_share >= 0.5

    def __str__(self) -> str:
        who, verb = ("Activations", "at least") if self.activations_dominate else ("Parameters", "less than")
        return (
            f"{who} dominate: on {self.target} one example takes {format_bytes(self.activation_bytes_per_example)} of "
            f"activations, {verb} the {format_bytes(self.parameter_bytes)} of the parameters."
        )


def dominate(activation_bytes_per_example: int, parameter_bytes: int) -> bool:
    """Whether activations dominate, from equality on; the batch does not matter."""
    return activation_bytes_per_example >= parameter_bytes


def slope(temp_bytes: tuple[int, int], batches: tuple[int, int] = SLOPE_BATCHES) -> int:
    """Bytes for each further example; XLA's padding can make that negative for a model without activations.

    >>> slope((1000, 1160), (16, 32))
    10
    """
    return max(0, (temp_bytes[1] - temp_bytes[0]) // (batches[1] - batches[0]))
