"""What others' per-example gradients cost beside their own framework's gradient: torch.func, Opacus, BackPACK.

The models are those of ``models.py`` as far as they can be written in torch, with the same sizes; the statistics are
mean and mean of squares. Ratios are to torch's own gradient, as pegprof's are to JAX's: absolute times of two
frameworks say more about their kernels than about the methods. Nothing here is needed by anything else.
"""

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.command import make_console, run_command, write_csv
from benchmarks.timing import TOO_SLOW, Timing, geometric_mean, make_schedule, time_once, time_rounds, warm_time
from pegprof.errors import PegprofError, nearest
from pegprof.units import format_ratio, format_seconds

REFERENCE = "torch grad"
SECONDS = 8.0  # of rounds for one repeat of one model, when the number of rounds was not asked for
TOLERANCE = 1e-3

Stats = dict[str, dict[str, Any]]  # {"mean", "second_moment"}: {parameter: tensor}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """A package, how to install it, and ``make(model, x, y)``: a function of nothing that gives the statistics."""

    name: str
    module: str
    install: str
    make: Callable[[Any, Any, Any], Callable[[], Stats]]

    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchModel:
    """``make()`` is a module from ``data()[0]`` to logits whose second axis is the classes, as cross entropy takes."""

    make: Callable[[], Any]
    data: Callable[[], tuple[Any, Any]]


# Models. torch is imported inside, so that this file can say what is missing where it is not installed.


def _make_dense() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def _make_cnn() -> Any:
    from torch import nn

    layers: list[Any] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 4 * 128, 10))


def _make_depthwise() -> Any:
    from torch import nn

    layers: list[Any] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for inputs in (32, 64, 128):
        layers += [
            nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs),
            nn.Conv2d(inputs, 2 * inputs, 1),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))


def _make_transformer(*, seq_len: int, layers: int = 4, width: int = 256, heads: int = 4, vocab: int = 256) -> Any:
    """As ``model_zoo/transformer.py``: pre-LN, no biases, tied embedding, learned positions, GELU, causal."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm = nn.LayerNorm(width, bias=False)
            self.mlp_norm = nn.LayerNorm(width, bias=False)
            self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x: Any) -> Any:
            normed = self.attention_norm(x)
            q, k, v = (
                dense(normed).unflatten(-1, (heads, -1)).transpose(-3, -2)
                for dense in (self.query, self.key, self.value)
            )
            score = q @ k.transpose(-2, -1) / (width // heads) ** 0.5
            past = torch.ones(seq_len, seq_len, dtype=torch.bool, device=x.device).tril()
            weight = score.masked_fill(~past, torch.finfo(score.dtype).min).softmax(-1)
            x = x + self.out((weight @ v).transpose(-3, -2).flatten(-2))
            return x + self.down(functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

    class Transformer(nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocab, width)
            self.positions = nn.Parameter(0.02 * torch.randn(seq_len, width))
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.final_norm = nn.LayerNorm(width, bias=False)
            nn.init.normal_(self.embed.weight, std=width**-0.5)

        def forward(self, token: Any) -> Any:
            x = self.blocks(self.embed(token) + self.positions)
            logits = functional.linear(self.final_norm(x), self.embed.weight)
            return logits.transpose(-2, -1)  # the classes second, as cross entropy takes them

    return Transformer()


def _make_lstm() -> Any:
    from torch import nn

    class LSTM(nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(128, 256, batch_first=True)
            self.head = nn.Linear(256, 10, bias=False)

        def forward(self, x: Any) -> Any:
            return self.head(self.lstm(x)[0]).transpose(-2, -1)

    return LSTM()


def _vectors(*shape: int, labels: tuple[int, ...] = ()) -> Callable[[], tuple[Any, Any]]:
    """Random inputs and labels of 10 classes, one an example or of the shape that follows the batch."""

    def data() -> tuple[Any, Any]:
        import torch

        return torch.randn(*shape), torch.randint(10, (shape[0], *labels))

    return data


def _tokens(B: int, seq_len: int, vocab: int = 256) -> Callable[[], tuple[Any, Any]]:
    def data() -> tuple[Any, Any]:
        import torch

        token = torch.randint(vocab, (B, seq_len + 1))
        return token[:, :-1].contiguous(), token[:, 1:].contiguous()

    return data


MODELS: dict[str, TorchModel] = {
    "dense": TorchModel(make=_make_dense, data=_vectors(256, 784)),
    "cnn": TorchModel(make=_make_cnn, data=_vectors(64, 3, 32, 32)),
    "depthwise": TorchModel(make=_make_depthwise, data=_vectors(64, 3, 32, 32)),
    "long": TorchModel(make=lambda: _make_transformer(seq_len=256), data=_tokens(16, 256)),
    "short": TorchModel(make=lambda: _make_transformer(seq_len=32), data=_tokens(64, 32)),
    "vocabulary": TorchModel(
        make=lambda: _make_transformer(seq_len=64, layers=2, width=128, vocab=16000), data=_tokens(16, 64, 16000)
    ),
    "lstm": TorchModel(make=_make_lstm, data=_vectors(32, 64, 128, labels=(64,))),
}


# Methods. Each gives mean and mean of squares of the gradients of the examples' own losses.


def _make_grad(model: Any, x: Any, y: Any) -> Callable[[], Stats]:
    from torch.nn import functional

    def run() -> Stats:
        model.zero_grad(set_to_none=True)
        functional.cross_entropy(model(x), y).backward()
        return {"mean": {name: p.grad for name, p in model.named_parameters()}}

    return run


def _make_func(model: Any, x: Any, y: Any) -> Callable[[], Stats]:
    import torch
    from torch.nn import functional

    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: Any, x: Any, y: Any) -> Any:
        logits = torch.func.functional_call(model, params, (x[None],))
        return functional.cross_entropy(logits, y[None])

    per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def run() -> Stats:
        return _of_stacks(per_example(params, x, y))

    return run


def _make_opacus(model: Any, x: Any, y: Any) -> Callable[[], Stats]:
    from opacus.grad_sample import GradSampleModule
    from torch.nn import functional

    wrapped = GradSampleModule(model, batch_first=True, loss_reduction="mean")

    def run() -> Stats:
        wrapped.zero_grad(set_to_none=True)
        functional.cross_entropy(wrapped(x), y).backward()
        # With loss_reduction="mean" the samples are already gradients of the examples' own losses.
        return _of_stacks({name: p.grad_sample for name, p in model.named_parameters()})

    return run


def _make_backpack(model: Any, x: Any, y: Any) -> Callable[[], Stats]:
    from backpack import backpack, extend
    from backpack.extensions import SumGradSquared
    from torch import nn

    extended, loss, B = extend(model), extend(nn.CrossEntropyLoss()), len(x)

    def run() -> Stats:
        extended.zero_grad(set_to_none=True)
        with backpack(SumGradSquared()):
            loss(extended(x), y).backward()
        named = dict(extended.named_parameters())
        # Under a mean loss BackPACK's gradients are g/B, so that its sum of squares is Σ g² / B².
        return {
            "mean": {name: p.grad for name, p in named.items()},
            "second_moment": {name: p.sum_grad_squared * B for name, p in named.items()},
        }

    return run


def _of_stacks(stacks: dict[str, Any]) -> Stats:
    return {
        "mean": {name: g.mean(0) for name, g in stacks.items()},
        "second_moment": {name: g.square().mean(0) for name, g in stacks.items()},
    }


TORCH = Peer(name=REFERENCE, module="torch", install="pip install torch", make=_make_grad)
PEERS = (
    Peer(name="torch.func", module="torch", install="pip install torch", make=_make_func),
    Peer(name="Opacus", module="opacus", install="pip install opacus", make=_make_opacus),
    Peer(name="BackPACK", module="backpack", install="pip install backpack-for-pytorch", make=_make_backpack),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One peer on one model; ``reason`` says why it was not timed."""

    timing: Timing | None = None
    reason: str = ""
    error: float | None = None  # of its statistics, relative to torch.func's


def measure_model(model: TorchModel, peers: Sequence[Peer], *, rounds: int | None, repeats: int) -> dict[str, Cell]:
    """Every peer with a module of its own with the same weights, since some leave hooks behind."""
    import torch

    torch.manual_seed(0)
    module, (x, y) = model.make(), model.data()
    weights = module.state_dict()
    cells, runs, found = {}, {}, {}
    reference_s = 0.0
    for peer in (TORCH, *peers):
        own = model.make()
        own.load_state_dict(weights)
        try:
            run = peer.make(own, x, y)
            found[peer.name] = run()
            first_s = warm_time(run, times=1)
        except Exception as error:  # a peer that does not know a layer says so in its own way
            cells[peer.name] = Cell(reason=f"fails: {type(error).__name__}: {error}".splitlines()[0][:60])
            continue
        reference_s = first_s if peer is TORCH else reference_s
        error_of = _max_rel_error(found[peer.name], found.get("torch.func", found[peer.name]))
        if first_s > TOO_SLOW * reference_s:
            skipped = f"skipped: {first_s / reference_s:.0f}× at its first run"
            cells[peer.name] = Cell(reason=skipped, error=error_of)
        else:
            cells[peer.name] = Cell(error=error_of)
            runs[peer.name] = run
    if REFERENCE in runs:
        warm_s = {name: time_once(run) for name, run in runs.items()}
        schedule = make_schedule(warm_s, REFERENCE, rounds=rounds, seconds=SECONDS)
        for name, timing in time_rounds(runs, REFERENCE, schedule, repeats).items():
            cells[name] = dataclasses.replace(cells[name], timing=timing)
    return cells


def _max_rel_error(stats: Stats, reference: Stats) -> float:
    """The largest difference, relative to the largest entry of the statistic."""
    errors = []
    for name in stats.keys() & reference.keys():
        scale = max(float(tensor.abs().max()) for tensor in reference[name].values())
        apart = max(float((stats[name][p] - reference[name][p]).abs().max()) for p in reference[name])
        errors.append(apart / scale)
    return max(errors, default=0.0)


def make_table(rows: dict[str, dict[str, Cell]], peers: Sequence[Peer]) -> Table:
    title = "Time of mean and second_moment in torch, as a ratio to torch's own gradient"
    table = Table(title=title, caption=f"(!): its statistics differ from torch.func's by more than {TOLERANCE:g}")
    for column in ("model", REFERENCE, *[peer.name for peer in peers]):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, cells in rows.items():
        grad = cells[REFERENCE].timing
        texts = [_text(cells[peer.name]) for peer in peers]
        table.add_row(name, format_seconds(grad.time_s if grad else None), *texts)
    table.add_section()
    means = []
    for peer in peers:
        known = [cells[peer.name].timing for cells in rows.values()]
        ratios = [timing.ratio for timing in known if timing]
        of = f" ({len(ratios)} of {len(rows)})" if 0 < len(ratios) < len(rows) else ""
        means.append(format_ratio(geometric_mean(ratios)) + of)
    table.add_row("geometric mean", "", *means)
    return table


def _text(cell: Cell) -> str:
    if cell.timing is None:
        return cell.reason
    return format_ratio(cell.timing.ratio) + (" (!)" if (cell.error or 0) > TOLERANCE else "")


def csv_rows(rows: dict[str, dict[str, Cell]]) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "method": name,
            "reason": cell.reason,
            "time_s": cell.timing and cell.timing.time_s,
            "time_ratio": cell.timing and cell.timing.ratio,
            "time_ratio_by_repeat": cell.timing and ";".join(f"{ratio:.4f}" for ratio in cell.timing.ratios),
            "runs": cell.timing and cell.timing.runs,
            "max_rel_error": cell.error,
        }
        for model, cells in rows.items()
        for name, cell in cells.items()
    ]


def main(
    models: Annotated[str, typer.Option(metavar="A,B", help=f"Of {', '.join(MODELS)}.")] = ",".join(MODELS),
    rounds: Annotated[
        int | None, typer.Option(min=1, help=f"Rounds a repeat; as many as fit {SECONDS:g} s if not given.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="The median of how many.")] = 3,
    csv_path: Annotated[str | None, typer.Option("--csv", metavar="F", help="Also write a CSV.")] = None,
) -> None:
    """Time torch.func, Opacus and BackPACK, where installed, against torch's own gradient."""
    for name in models.split(","):
        if name not in MODELS:
            raise PegprofError(f"no model is called {name!r}", hint=nearest(name, MODELS))
    console = make_console()
    for peer in PEERS:
        if not (peer.is_installed() and TORCH.is_installed()):
            console.print(f"{peer.name} is not installed: {peer.install}", markup=False, highlight=False)
    if not TORCH.is_installed():
        return
    peers = [peer for peer in PEERS if peer.is_installed()]
    rows = {}
    for name in models.split(","):
        print(name, file=sys.stderr, flush=True)
        rows[name] = measure_model(MODELS[name], peers, rounds=rounds, repeats=repeats)
    console.print(make_table(rows, peers))
    if csv_path:
        write_csv(csv_rows(rows), csv_path)


if __name__ == "__main__":
    run_command(main)
