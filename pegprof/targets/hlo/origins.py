"""Where an array of a compiled program comes from and where it leads to: a parameter of the model, or a line of source.

XLA combines collectives, and a combined one has no line of its own, or that of one of its many operands. So operands
are followed back and results on, through operations that only move or scale entries. An entry parameter has its name in
the text; of the results the caller knows which parameter each mirrors.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from pegprof.targets.hlo.module import Computation, Module, Operation
from pegprof.targets.hlo.traffic import SAME_ENTRIES

MOVING = SAME_ENTRIES | {"slice", "dynamic-slice", "copy-start", "copy-done", "dynamic-update-slice"}
"""The array that these give is one that they take, or a part of it, or holds it."""

ELEMENTWISE = {
    "abs", "add", "and", "broadcast", "clamp", "compare", "concatenate", "divide", "exponential", "log", "maximum",
    "minimum", "multiply", "negate", "or", "pad", "power", "rsqrt", "select", "sign", "sqrt", "subtract",
}  # fmt: skip
"""What a mean, a moment or an optimizer's update is finished by: none of them mixes two parameters."""

CALLS = ("fusion", "call", "async-start")
MOST_STEPS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """A part of what a collective moves: how much, of which parameter, made by which line. "" is unknown."""

    bytes: int
    parameter: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """One of the arrays that an operation gives; of a tuple, the one with that number."""

    computation: Computation
    operation: Operation
    index: int = 0

    @property
    def bytes(self) -> int:
        results = self.operation.results
        return results[self.index].bytes if self.index < len(results) else self.operation.bytes

    @property
    def key(self) -> tuple[str, str, int]:
        return self.computation.name, self.operation.name, self.index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Where in a concatenation an array is: the entries from ``start`` to ``stop`` along an axis."""

    axis: int
    start: int
    stop: int

    @classmethod
    def of(cls, value: Value, user: Operation, span: "Span | None") -> "Span | None":
        """Where a value is in what an operation makes of it; None where that is not followed."""
        if user.opcode == "concatenate":
            (axis,) = user.dims("dimensions")
            parts = [*value.computation.operands(user)]
            before = parts[: [part.name for part in parts].index(value.operation.name)]
            start = sum(part.results[0].shape[axis] for part in before)
            return cls(axis=axis, start=start, stop=start + value.operation.results[0].shape[axis])
        same = user.results and value.operation.results and user.results[0].shape == value.operation.results[0].shape
        return span if same else None

    def is_left_out(self, operation: Operation) -> bool:
        """Whether an operation is a slice of other entries."""
        if operation.opcode != "slice":
            return False
        start, stop, *_ = map(int, re.findall(r"\d+", operation.attribute("slice").split("]")[self.axis]))
        return stop <= self.start or self.stop <= start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origins:
    """Of the arrays of a program.

    Args:
      module: the program.
      outputs: for each of its results the parameter that it mirrors; "" if it mirrors none.
    """

    module: Module
    outputs: Sequence[str] = ()

    def shares(self, computation: Computation, collective: Operation, sizes: Sequence[int]) -> list[Share]:
        """What a collective moves, operand by operand; ``sizes`` are the bytes of its results."""
        operands = computation.operands(collective)
        if len(operands) != len(sizes):
            return []
        found = []
        for index, (operand, size) in enumerate(zip(operands, sizes, strict=True)):
            made = list(self._come_from(Value(computation=computation, operation=operand), size))
            if not any(share.parameter for share in made):
                leads_to = self._lead_to(Value(computation=computation, operation=collective, index=index))
                made = _named(made, leads_to, size) or made
            found += made
        return found

    def source(self, operation: Operation) -> str:
        """Its line of source, or else the path of JAX's primitive that it comes from."""
        return self.module.source(operation) or operation.op_name

    def _come_from(self, value: Value, size: int) -> Iterator[Share]:
        """Back to what made an array; of a concatenation, to what made each of its parts."""
        source, is_moved = "", True
        for _ in range(MOST_STEPS):
            operation, computation = value.operation, value.computation
            if operation.opcode == "parameter" and computation.name == self.module.entry.name:
                name = parameter_name(operation.op_name) if is_moved else ""
                yield Share(bytes=size, parameter=name, source=source)
                return
            if operation.opcode == "concatenate" and is_moved:
                whole = operation.bytes or 1
                for part in computation.operands(operation):
                    of_part = Value(computation=computation, operation=part)
                    yield from self._come_from(of_part, size * part.bytes // whole)
                return
            before = self._before(value)
            if before is None:
                if found := self.source(operation):
                    yield Share(bytes=size, source=source or found)
                    return
                is_moved, before = False, self._largest_operand(value)
            if before is None:
                break
            is_told = before.computation is computation and not operation.collective  # else it is another's line
            source = source or (self.source(operation) if is_told else "")
            value = before
        yield Share(bytes=size, source=source)

    def _before(self, value: Value) -> Value | None:
        """What a value is, or is a part of, one step before; None if it is made here."""
        operation = value.operation
        if operation.opcode == "parameter":
            return self._given(value)
        if operation.opcode == "tuple":
            return self._operand(value, value.index)
        if operation.opcode == "get-tuple-element":
            return self._operand(value, 0, int(operation.attribute("index")))
        if operation.collective:
            return self._operand(value, value.index)
        if operation.opcode in MOVING:
            return self._operand(value, 1 if operation.opcode == "dynamic-update-slice" else 0)
        if operation.opcode == "optimization-barrier" or operation.opcode.endswith("-done"):
            return self._operand(value, 0, value.index)
        if operation.opcode in (*CALLS, "while"):
            name = operation.attribute("body").lstrip("%") if operation.opcode == "while" else operation.called[0]
            inner = self.module.computations[name]
            return Value(computation=inner, operation=inner.root, index=value.index)
        return None

    def _given(self, value: Value) -> Value | None:
        """What the caller of a computation gives for its parameter."""
        caller = self.module.callers.get(value.computation.name)
        if caller is None:
            return None
        computation, operation = caller
        of_caller = Value(computation=computation, operation=operation)
        return self._operand(of_caller, 0 if operation.opcode == "while" else int(value.operation.given), value.index)

    def _operand(self, value: Value, number: int, index: int = 0) -> Value | None:
        names, known = value.operation.operands, value.computation.by_name
        if number >= len(names) or names[number] not in known:
            return None
        return Value(computation=value.computation, operation=known[names[number]], index=index)

    def _largest_operand(self, value: Value) -> Value | None:
        operands = value.computation.operands(value.operation)
        largest = max(operands, key=lambda each: each.bytes, default=None)
        return Value(computation=value.computation, operation=largest) if largest else None

    def _lead_to(self, start: Value) -> dict[str, int]:
        """On to results of the program: bytes by the parameter that they mirror; none if it cannot be told which."""
        reached: dict[int, int] = {}
        waiting: list[tuple[Value, int, Span | None]] = [(start, start.bytes, None)]
        seen = {start.key}
        while waiting and len(seen) < MOST_STEPS:
            value, size, span = waiting.pop()
            if value.operation.is_root and value.computation.name == self.module.entry.name:
                reached[value.index] = max(size, reached.get(value.index, 0))
            for after in self._after(value):
                if after.key not in seen and not (span and span.is_left_out(after.operation)):
                    seen.add(after.key)
                    waiting.append((after, min(size, after.bytes), Span.of(value, after.operation, span)))
        found: dict[str, int] = {}
        for index, size in reached.items():
            if index < len(self.outputs) and (name := self.outputs[index]):
                found[name] = found.get(name, 0) + size
        is_told = len(found) == 1 or sum(found.values()) <= start.bytes
        return found if is_told else {}

    def _after(self, value: Value) -> Iterator[Value]:
        """Who takes a value and hands it on."""
        operation, computation = value.operation, value.computation
        if operation.is_root and (caller := self.module.callers.get(computation.name)) and caller[1].opcode in CALLS:
            yield Value(computation=caller[0], operation=caller[1], index=value.index)
        for user, position in computation.users.get(operation.name, ()):
            if user.opcode == "get-tuple-element":
                if int(user.attribute("index")) == value.index:
                    yield Value(computation=computation, operation=user)
            elif user.opcode == "tuple":
                yield Value(computation=computation, operation=user, index=position)
            elif user.opcode == "optimization-barrier" or user.opcode.endswith("-done"):
                yield Value(computation=computation, operation=user, index=value.index)
            elif user.opcode in CALLS:
                inner = self.module.computations[user.called[0]]
                if position < len(inner.parameters):
                    yield Value(computation=inner, operation=inner.parameters[position])
            elif user.collective:
                yield Value(computation=computation, operation=user, index=position)
            elif user.opcode in MOVING | ELEMENTWISE or (
                user.opcode == "scatter" and position == 0
            ):  # rows added to it
                yield Value(computation=computation, operation=user)


def _named(made: Sequence[Share], leads_to: Mapping[str, int], size: int) -> list[Share]:
    """Shares by the parameters that an array leads to. The line of each is that of the part of its size."""
    whole = max(sum(leads_to.values()), 1)
    return [
        Share(
            bytes=size * part // whole,
            parameter=name,
            source=min(made, key=lambda share: abs(share.bytes - part)).source,
        )
        for name, part in leads_to.items()
    ]


_KEYS = re.compile(r"\[\\?'([^']*?)\\?'\]|\[(\d+)\]|\.(\w+)")


def parameter_name(op_name: str) -> str:
    """A parameter's name as plans have it, from that of an argument; anything else as it is.

    >>> parameter_name("params['block_0']['kernel']"), parameter_name("batch['x']"), parameter_name("params")
    ('block_0/kernel', "batch['x']", 'params')
    """
    root = re.match(r"\w*", op_name)
    keys = ["".join(found.groups("")) for found in _KEYS.finditer(op_name)]
    return "/".join(keys) if keys and root and root[0] == "params" else op_name
