"""Do activations dominate parameters? The paper's condition for per-example statistics to be cheap in memory.

The activations of one example are the slope of the plain gradient's temporaries between two batch sizes, in XLA's own
buffer assignment for the target. The two sizes are fixed, so that the verdict does not depend on the batch asked for;
below 16 examples XLA still chooses other layouts, and the slope wavers by a fifth.

Beside it stand two witnesses who know nothing of XLA: the count of what the backward pass keeps, from the trace
(``residuals.py``), and the paper's rule T ≥ D, layer by layer. Where they disagree, ``explain.py`` says so.

Temporaries that do not grow with the batch do not mean that there are no activations: to a very small model a TPU's
compiler assigns no temporaries at all. XLA's figure is then unknown, and the trace's count decides.
"""

import dataclasses

from pegprof.result.layers import Layer
from pegprof.units import format_bytes

SLOPE_BATCHES = (16, 32)
TRACED_BATCH = 2  # what is kept of the examples is counted on a batch; of one, a loss may do without


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The bytes that the activations of one example and the parameters take on a target.

    ``activation_bytes_per_example`` is XLA's figure, None where it cannot tell; older files have 0 for that.
    ``traced_bytes_per_example`` is what the backward pass keeps by the trace alone, before XLA fuses and recomputes
    anything. ``layers`` are the model's matrices, none where the model could not be planned.
    """

    target: str
    activation_bytes_per_example: int | None
    parameter_bytes: int
    traced_bytes_per_example: int | None = None
    layers: tuple[Layer, ...] = ()

    @property
    def activations_dominate(self) -> bool | None:
        """By XLA's figure or, where that cannot tell, by the trace; None where neither can."""
        return self.trace_says if self.xla_says is None else self.xla_says

    @property
    def xla_says(self) -> bool | None:
        """Whether activations dominate by XLA's figure."""
        known = self.activation_bytes_per_example
        return dominate(known, self.parameter_bytes) if known else None

    @property
    def trace_says(self) -> bool | None:
        """Whether activations dominate by the trace's count."""
        traced = self.traced_bytes_per_example
        return None if traced is None else dominate(traced, self.parameter_bytes)

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
        cannot_tell = f"XLA's figure for {self.target} cannot tell"
        if self.activations_dominate is None:
            what = "Whether activations or parameters dominate is not known"
            return f"{what}: {cannot_tell}, and there is no count from the trace."
        who, verb = ("Activations", "at least") if self.activations_dominate else ("Parameters", "less than")
        compared = f"{verb} the {format_bytes(self.parameter_bytes)} of the parameters."
        if self.xla_says is None:
            count = f"it counts {format_bytes(self.traced_bytes_per_example)} of activations for one example"
            why = "its temporaries do not grow with the batch"
            return f"{who} dominate, by the trace: {count}, {compared} {cannot_tell}: {why}."
        activations = format_bytes(self.activation_bytes_per_example)
        return f"{who} dominate: on {self.target} one example takes {activations} of activations, {compared}"


def dominate(activation_bytes_per_example: int, parameter_bytes: int) -> bool:
    """Whether activations dominate, from equality on; the batch does not matter."""
    return activation_bytes_per_example >= parameter_bytes


def slope(temp_bytes: tuple[int, int], batches: tuple[int, int] = SLOPE_BATCHES) -> int | None:
    """Bytes for each further example; None where there are none, and padding can make them negative: it cannot tell.

    >>> slope((1000, 1160), (16, 32))
    10
    """
    found = (temp_bytes[1] - temp_bytes[0]) // (batches[1] - batches[0])
    return found if found > 0 else None
