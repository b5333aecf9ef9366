"""What a compiled program sends from device to device: its collectives, how often they run, and what they are of."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pegprof.targets.chips import CHIPS
from pegprof.targets.hlo.module import Computation, Module, Operation, parse_module
from pegprof.targets.hlo.origins import Origins, Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one kind at one place of a program.

    Args:
      kind: as XLA calls it.
      count: how many operations.
      bytes: of their results on one device, for one run of each.
      trips: how often each runs.
      devices: how many take part in one.
      loop: the line of source, or the path of JAX's primitive, of the loop that it is in; empty outside of loops.
      source: its own, likewise. Where several were combined into one, that of the largest part.
      parameter: of the model, whose entries it moves; of several, that which takes most bytes. Empty for activations.
    """

    kind: str
    count: int
    bytes: int
    trips: int
    devices: int
    loop: str
    source: str
    parameter: str = ""

    @property
    def total_bytes(self) -> int:
        return self.bytes * self.trips

    @property
    def sent_bytes(self) -> float:
        """What a device must send at least, whatever the algorithm: a reduced entry travels twice."""
        n = self.devices
        shares = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1.0}
        return self.total_bytes * shares.get(self.kind, (n - 1) / n)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def find_collectives(text: str, outputs: Sequence[str] = ()) -> tuple[Collective, ...]:
    """Those of ``compiled.as_text()``, the largest first. A loop whose trips the text does not tell counts once.

    Args:
      text: the program.
      outputs: for each of its results the parameter of the model that it mirrors; "" if it mirrors none.
    """
    module = parse_module(text)
    origins = Origins(module=module, outputs=outputs)
    partitions = re.search(r"num_partitions=(\d+)", text)
    everyone = int(partitions[1]) if partitions else 1
    found: dict[tuple[str, int, int, str, str, str], list[int]] = {}
    chains: set[tuple[str, str, str]] = set()
    for computation, operation, trips, loop in _walk(origins, module.entry, 1, ""):
        inside = operation if operation.opcode != "fusion" else _inside(module, operation)
        if (chain := _chain(inside)) and (*chain, loop) in chains:
            continue
        chains.add((*chain, loop))
        sizes = _moved(operation)
        source, parameter = _find_origin(origins, computation, operation, sizes)
        key = _kind(operation), trips, _group_size(inside.attributes, everyone), loop, source, parameter
        found.setdefault(key, []).append(sum(sizes))
    collectives = [
        Collective(
            kind=kind,
            count=len(sizes),
            bytes=sum(sizes),
            trips=trips,
            devices=devices,
            loop=loop,
            source=source,
            parameter=parameter,
        )
        for (kind, trips, devices, loop, source, parameter), sizes in found.items()
    ]
    return tuple(sorted(collectives, key=lambda each: -each.total_bytes))


def _chain(operation: Operation) -> tuple[str, str]:
    """What tells the parts of one collective. A TPU's compiler puts it into several fusions, to compute meanwhile."""
    return operation.attribute("channel_id"), operation.frontend_attributes.get("chain_id", operation.name)


def _find_origin(
    origins: Origins, computation: Computation, operation: Operation, sizes: Sequence[int]
) -> tuple[str, str]:
    """The line and the parameter that most of a collective's bytes are of."""
    own, shares = origins.source(operation), origins.shares(computation, operation, sizes)
    if not shares:
        return own, ""
    most = _largest(shares)
    return own if own and len(sizes) == 1 else most.source or own, most.parameter


def _largest(shares: Sequence[Share]) -> Share:
    """The largest share of the parameter that has most, or of the line."""
    totals: dict[tuple[str, str], int] = {}
    for share in shares:
        key = (share.parameter, "" if share.parameter else share.source)
        totals[key] = totals.get(key, 0) + share.bytes
    parameter, source = max(totals, key=lambda key: (totals[key], bool(key[0])))
    ours = (share for share in shares if share.parameter == parameter and source in ("", share.source))
    return max(ours, key=lambda share: share.bytes)


def floor_s(collectives: Sequence[Collective], chip: str) -> float | None:
    """The time that a chip's links need for them at least, by their published bandwidth; None if that is not known."""
    bandwidth = CHIPS[chip].link_bandwidth
    return sum(each.sent_bytes for each in collectives) / bandwidth if bandwidth else None


_GROUPS = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\})")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\S+)? \{([^}]*)\}")


def _group_size(attributes: str, everyone: int) -> int:
    """How many devices take part: all, where the text names none.

    >>> _group_size("replica_groups=mesh['a'=4,'b'=16], device_ids=([16,4]T(1,0)) {'a'}, dimensions={2}", 64)
    4
    """
    if found := _MESH_GROUPS.search(attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    if found := _GROUPS.search(attributes):
        return int(found[1]) if found[1] else len(found[2].split(","))
    return everyone


def _walk(
    origins: Origins, computation: Computation, trips: int, loop: str
) -> Iterator[tuple[Computation, Operation, int, str]]:
    module = origins.module
    for operation in computation.operations:
        if operation.opcode == "while":
            count = module.trip_count(operation, computation)
            body = module.computations[operation.attribute("body").lstrip("%")]
            inner = origins.source(operation) or operation.name
            yield from _walk(origins, body, trips * (1 if count is None else count), inner)
        elif _kind(operation):
            yield computation, operation, trips, loop
        else:  # fusions too: a TPU's compiler puts collectives into them, and asynchronous ones into calls
            for name in operation.called:
                if name in module.computations:
                    yield from _walk(origins, module.computations[name], trips, loop)


def _kind(operation: Operation) -> str:
    """The kind of a collective; an asynchronous one counts where it starts.

    A TPU's compiler makes a reduce-scatter as a fusion of an all-reduce with the slices that a device keeps.
    """
    if operation.opcode == "fusion" and any(name.startswith("all-reduce-scatter") for name in operation.called):
        return "reduce-scatter"
    return operation.collective


def _inside(module: Module, fusion: Operation) -> Operation:
    """The collective that a fusion is made of."""
    inner = (each for name in fusion.called for each in module.computations[name].operations)
    return next((each for each in inner if _kind(each)), fusion)


def _moved(operation: Operation) -> list[int]:
    """The bytes of its results. What starts an asynchronous one gives its operands as well, before them."""
    results = operation.results
    if operation.opcode.endswith("-start") and operation.opcode != "all-reduce-start" and len(results) > 1:
        results = results[len(results) // 2 :] if len(results) % 2 == 0 else results[1:]
    return [array.bytes for array in results]
