"""A fixed Result with something of everything in it, for tests of what people and programs read."""

from pegprof.engine.plan import Candidate, Plan, PlanRow, Schedule
from pegprof.result.environment import Environment
from pegprof.result.findings import Facts
from pegprof.result.layers import find_layers
from pegprof.result.result import Result, Row
from pegprof.result.samples import Sample
from pegprof.result.settings import Settings
from pegprof.result.verdict import Verdict

GIB = 2**30


def make_row(method, **fields):
    common = dict(
        model="transformer-151m",
        parameters=184_415_232,
        batch=64,
        seq_len=512,
        dtype="float32",
        stats="mean,second_moment",
        method=method,
        target="cpu",
        device="Some Processor, 2 cores",
        evidence="measured",
        status="ok",
        capacity_bytes=20 * GIB,
        parameter_bytes=int(0.69 * GIB),
        activation_bytes_per_example=int(1.31 * GIB),
        activations_dominate=True,
        seed=0,
        timestamp="2026-01-02T03:04:05+00:00",
    )
    return Row(**{**common, **fields})


ENVIRONMENT = Environment(
    pegprof="0.1.0",
    python="3.11.7",
    system="Linux x86_64",
    jax="0.10.2",
    jaxlib="0.10.2",
    flax="0.12.8",
    optax="0.2.8",
    backend="cpu",
    device_kind="cpu",
    device_count=1,
    xla_flags="--xla_cpu_use_thunk_runtime=true",
    libtpu_init_args=None,
    matmul_precision=None,
    x64=False,
)


def make_facts(**fields):
    common = dict(
        model="transformer-151m",
        model_options={"seq_len": 512},
        environment=ENVIRONMENT,
        parameters=184_415_232,
        parameter_bytes=int(0.69 * GIB),
        seq_len=512,
        dtype="float32",
        device="cpu",
        device_bytes=None,
        jax="0.10.2",
        jaxlib="0.10.2",
        tolerance=1e-3,
        smallest_batch=1,
        batch_divisor=1,
        flops_per_s=1e11,
    )
    return Facts(**{**common, **fields})


def make_samples(*processes):
    """One sample for each time of each process."""
    return tuple(
        Sample(process=process, round=number, time_s=time_s)
        for process, times_s in enumerate(processes)
        for number, time_s in enumerate(times_s, start=1)
    )


GRAD = make_row(
    "grad",
    status="refused",
    reason="needs 85.0 GiB, 20.0 GiB available; timed at batch 2",
    time_s=10.25,
    time_iqr_s=0.31,
    time_batch=2,
    runs=3,
    time_ratio=1.0,
    compile_s=4.2,
    peak_bytes=85 * GIB,
    peak_ratio=1.0,
    flops=41_300_000_000_000,
    max_rel_error=2.1e-6,
)
VMAP = make_row(
    "vmap",
    status="refused",
    reason="needs 86.7 GiB, 20.0 GiB available; over bare examples, [as they are]; timed at batch 2",
    time_s=14.2,
    time_iqr_s=0.62,
    time_batch=2,
    runs=3,
    time_ratio=1.3854,
    compile_s=5.3,
    peak_bytes=int(86.7 * GIB),
    peak_ratio=1.02,
    flops=41_400_000_000_000,
)
MICROBATCH = make_row(
    "microbatch",
    status="failed",
    evidence="compiled",
    microbatch_size=1,
    reason="killed by SIGKILL, as the system does when memory runs out; 1 at a time",
)
SURGERY = make_row(
    "surgery",
    microbatch_size=8,
    reason="8 at a time; timed at batch 2",
    time_s=10.1,
    time_iqr_s=0.0123,
    time_batch=2,
    runs=3,
    time_ratio=0.9854,
    compile_s=11.0,
    peak_bytes=13 * GIB,
    host_peak_bytes=int(12.9 * GIB),
    peak_ratio=0.1529,
    flops=41_500_000_000_000,
    max_rel_error=1.1e-7,
    materialised_parameters=0,
)

PLAN = Plan(
    rows=(
        *(
            PlanRow(
                parameter=f"block_{i}/attention/{name}/kernel",
                shape=(1024, 16, 64),
                strategy="loop",
                contraction="bti,btop->iop",
                rank=512,
                flops=6.9e10,
                bytes_moved=1e9,
                bytes=4 * 2**20,
                why="one product an example, every statistic from it",
                candidates=(Candidate(strategy="loop", seconds=1.5, flops=6.9e10, bytes_moved=1e9, bytes_held=4e6),),
            )
            for i in range(2)
            for name in ("key", "query")
        ),
        PlanRow(
            parameter="embed/embedding",
            shape=(32100, 1024),
            strategy="tied",
            contraction="bti,bto->io + scatter-add bto->io",
            rank=1024,
            flops=2.2e12,
            bytes_moved=3.5e10,
            bytes=125 * 2**20,
            why="one product an example, the rows looked up added into it",
        ),
        PlanRow(
            parameter="final_norm/scale",
            shape=(1024,),
            strategy="direct",
            contraction="bto->o",
            bytes_moved=1.3e8,
            bytes=262144,
            why="the gradient is no larger than what it is made from",
        ),
    ),
    stats=("mean", "second_moment"),
    batch=64,
    microbatch_size=8,
    backend="cpu",
    schedules=(
        Schedule(microbatch_size=64, seconds=12.5, bytes=9e10),
        Schedule(microbatch_size=8, seconds=12.0, bytes=1.3e10),
    ),
    rates={"bandwidth": 1e10},
)

RESULT = Result(
    settings=Settings(model="transformer-151m", options={"seq_len": 512}),
    rows=(GRAD, VMAP, MICROBATCH, SURGERY),
    verdict=Verdict(
        target="cpu",
        activation_bytes_per_example=int(1.31 * GIB),
        parameter_bytes=int(0.69 * GIB),
        traced_bytes_per_example=int(1.65 * GIB),
        layers=find_layers(PLAN),
    ),
    samples={(64, "grad"): make_samples((10.1, 10.25, 10.6)), (64, "surgery"): make_samples((10.1, 10.1, 10.2))},
    plans={64: PLAN},
    environment=ENVIRONMENT,
    options={"seq_len": 512, "layers": 12},
)


def make_compiled_row(method, target, device, capacity_gib, needs_gib, ratio=None, **fields):
    """As for a device that is not here: compiled, never timed."""
    needs = {"peak_bytes": int(needs_gib * GIB), "capacity_bytes": int(capacity_gib * GIB), "peak_ratio": ratio}
    common = {
        "target": target,
        "device": device,
        "evidence": "compiled",
        "compile_s": 40.0,
        "flops": 41_300_000_000_000,
    }
    return make_row(method, **{**common, **needs, **fields})


_V5P, _V5E, _H100 = ("tpu-v5p", "TPU v5p", 95.74), ("tpu-v5e", "TPU v5e", 15.75), ("h100", "NVIDIA H100 80 GB", 79.1)

RESULT_ON_TARGETS = Result(
    settings=Settings(model="transformer-151m", targets=("tpu-v5p", "tpu-v5e", "h100"), time=False),
    rows=(
        make_compiled_row("grad", *_V5P, 31.4, 1.0),
        make_compiled_row("vmap", *_V5P, 32.1, 1.0223, reason="over bare examples"),
        make_compiled_row("surgery", *_V5P, 31.6, 1.0064, microbatch_size=64),
        make_compiled_row("grad", *_V5E, 24.1, status="refused", reason="needs 24.1 GiB, 15.8 GiB available"),
        make_compiled_row(
            "vmap", *_V5E, 29.6, status="refused", reason="needs 29.6 GiB, 15.8 GiB available; over bare examples"
        ),
        make_compiled_row("surgery", *_V5E, 12.9, microbatch_size=16, reason="16 at a time"),
        make_compiled_row("grad", *_H100, 59.5, 1.0, reason="from the cache, as compiled before"),
        make_compiled_row(
            "vmap", *_H100, 60.9, 1.0235, reason="over bare examples; from the cache, as compiled before"
        ),
        make_compiled_row(
            "surgery", *_H100, 59.1, 0.9933, microbatch_size=64, reason="from the cache, as compiled before"
        ),
    ),
    verdict=Verdict(
        target="tpu-v5p",
        activation_bytes_per_example=int(0.47 * GIB),
        parameter_bytes=int(0.69 * GIB),
        traced_bytes_per_example=int(1.65 * GIB),
        layers=find_layers(PLAN),
    ),
    other_verdicts=(
        Verdict(
            target="h100",
            activation_bytes_per_example=int(0.91 * GIB),
            parameter_bytes=int(0.69 * GIB),
            traced_bytes_per_example=int(1.65 * GIB),
            layers=find_layers(PLAN),
        ),
    ),
)
