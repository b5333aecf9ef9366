"""What workers find out of a model, of a compiled method and of a run: the records that their answers are."""

import dataclasses
from collections.abc import Mapping

from pegprof.engine.plan import Plan
from pegprof.result.environment import Environment
from pegprof.targets.hlo.collectives import Collective

FAR_APART = 0.1  # a measured peak that differs from XLA's figure by more than this share of it is worth a remark,
NEAR_BYTES = 32 * 2**20  # if it is by more than this


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the model and of the device that is here."""

    model: str
    model_options: Mapping[str, object]
    environment: Environment
    parameters: int
    parameter_bytes: int
    seq_len: int | None
    dtype: str
    device: str
    device_bytes: int | None
    jax: str
    jaxlib: str
    tolerance: float  # of two right statistics
    smallest_batch: int  # that the statistics are defined for
    batch_divisor: int  # of all batches that the methods can take
    flops_per_s: float | None  # that the device can do
    optimizer_state_bytes: int | None = None  # with a step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One method compiled at one batch for one target, or why it could not be."""

    failure: str | None = None
    lacked: str = ""  # what the machine had too little of just then, "memory" or "time", if it failed for that
    notes: tuple[str, ...] = ()
    microbatch_size: int | None = None
    materialised_parameters: int | None = None
    plan: Plan | None = None  # surgery's
    compile_s: float | None = None
    flops: int | None = None
    peak_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None
    refused: bool = False  # by the compiler, which says that peak_bytes are needed and available_bytes there
    available_bytes: int | None = None
    second_try: bool = False  # the compiler failed, and did not without something
    from_cache: bool = False
    collectives: tuple[Collective, ...] = ()  # on a mesh

    @property
    def assigned_bytes(self) -> int | None:
        """The peak, if it is that of a program. What a refused one would need, after all that the compiler did to make
        it fit, is not to be compared with it."""
        return None if self.refused else self.peak_bytes

    def fits(self, capacity_bytes: int | None) -> bool:
        """Whether it was compiled, and needs no more than that."""
        if self.failure or self.refused or self.peak_bytes is None:
            return False
        return capacity_bytes is None or self.peak_bytes <= capacity_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """A peak of memory that was measured, the batch that it is of, and XLA's own figure for the same program."""

    batch: int
    xla_bytes: int
    host_bytes: int | None = None
    device_bytes: int | None = None

    @property
    def measured_bytes(self) -> int:
        return (self.host_bytes if self.device_bytes is None else self.device_bytes) or 0

    @property
    def is_far_from_xla(self) -> bool:
        """Libraries that XLA calls may allocate memory that is not in its plan."""
        return abs(self.measured_bytes - self.xla_bytes) > max(FAR_APART * self.xla_bytes, NEAR_BYTES)
