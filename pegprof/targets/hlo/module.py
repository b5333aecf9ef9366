"""The text of an optimised HLO module in, its computations and operations out.

Parsing reads each line once, up to the end of the operands. Attributes stay text until somebody asks for them, because
most of a module of 20 MB is backend configuration that nobody reads.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence

from pegprof.targets.hlo.arrays import Array, parse_arrays

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
)  # fmt: skip

_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)")
_CALLED_LISTS = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_NAMES = re.compile(r"%([\w.\-]+)")
_PAIRS = re.compile(r'([\w.]+)="((?:[^"\\]|\\.)*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_HEAD = re.compile(r"  (ROOT )?%([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OUTSIDE = ("site-packages", "dist-packages", "/lib/python3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One instruction.

    Args:
      name: unique in its module.
      opcode: as XLA spells it, ``fusion`` or ``dynamic-slice``.
      results: the arrays that it gives, the leaves of a tuple in order.
      operands: names of operations of the same computation.
      given: what stands in the operands' place of a constant or a parameter.
      attributes: the rest of its text, without ``backend_config``.
      backend_config: as text; empty if it has none.
      is_root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    given: str
    attributes: str
    backend_config: str
    is_root: bool

    @property
    def bytes(self) -> int:
        """Of all results, wherever they lie."""
        return sum(array.bytes for array in self.results)

    @property
    def stem(self) -> str:
        """The name without its number, of an unnamed call its target: operations of one kind share it.

        >>> parse_operation("  %loop_add_fusion.12 = f32[] add(%x, %y)").stem
        'loop_add_fusion'
        """
        stem = re.sub(r"(?:\.(?:\d+|clone|remat\d*|sunk))+$", "", self.name)
        return self.custom_call_target if stem == "custom-call" else stem

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that it names, in the order of the text."""
        found = [match[1] for match in _CALLED.finditer(self.attributes)]
        for group in _CALLED_LISTS.finditer(self.attributes):
            found += [name.strip().lstrip("%") for name in group[1].split(",") if name.strip()]
        return tuple(dict.fromkeys(found))

    @property
    def collective(self) -> str:
        """The kind, if it is a collective; of an asynchronous one, if it starts there."""
        opcode = self.opcode.removesuffix("-start")
        return opcode if opcode in COLLECTIVES else ""

    @property
    def op_name(self) -> str:
        """The path of JAX's primitive that it comes from."""
        return self._find(r'op_name="((?:[^"\\]|\\.)*)"').replace("\\'", "'")

    @property
    def custom_call_target(self) -> str:
        return self._find(r'custom_call_target="([^"]*)"')

    @functools.cached_property
    def frontend_attributes(self) -> Mapping[str, str]:
        """What ``jax.experimental.xla_metadata.set_xla_metadata`` put there."""
        start = self.attributes.find("frontend_attributes={")
        if start < 0:
            return {}
        end = self.attributes.find("metadata={op_name", start)
        return dict(_PAIRS.findall(self.attributes[start : end if end > 0 else None]))

    def attribute(self, name: str) -> str:
        """What stands behind ``name=`` up to the next comma outside of braces; empty if there is no such thing.

        >>> parse_operation("  %d = f32[] dot(%x, %y), lhs_contracting_dims={0,1}, z={}").attribute(
        ...     "lhs_contracting_dims"
        ... )
        '{0,1}'
        """
        return self._find(rf"(?<![\w]){name}=(\{{[^}}]*\}}|[^,]*)")

    def dims(self, name: str) -> tuple[int, ...]:
        """An attribute that is a list of numbers."""
        return tuple(int(x) for x in re.findall(r"-?\d+", self.attribute(name)))

    def _find(self, pattern: str) -> str:
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    """A list of operations, in the order in which they run."""

    name: str
    operations: tuple[Operation, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Operation]:
        return {operation.name: operation for operation in self.operations}

    @functools.cached_property
    def root(self) -> Operation:
        return next(operation for operation in self.operations if operation.is_root)

    @functools.cached_property
    def parameters(self) -> tuple[Operation, ...]:
        """In the order of their numbers."""
        found = [operation for operation in self.operations if operation.opcode == "parameter"]
        return tuple(sorted(found, key=lambda operation: int(operation.given)))

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[tuple[Operation, int], ...]]:
        """Who takes an operation, and as which of its operands."""
        found: dict[str, list[tuple[Operation, int]]] = {}
        for operation in self.operations:
            for index, name in enumerate(operation.operands):
                found.setdefault(name, []).append((operation, index))
        return {name: tuple(users) for name, users in found.items()}

    def operands(self, operation: Operation) -> tuple[Operation, ...]:
        return tuple(self.by_name[name] for name in operation.operands if name in self.by_name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """A program. ``frames`` is the table of source lines: (file, line, the frame that called) by number."""

    name: str
    entry: Computation
    computations: Mapping[str, Computation]
    frames: Mapping[int, tuple[str, int, int]]

    def source(self, operation: Operation) -> str:
        """``file:line`` of the innermost frame that belongs to no installed package; empty if there is none."""
        if line := operation._find(r"source_line=(\d+)"):
            file = operation._find(r'source_file="([^"]*)"')
            return f"{file}:{line}"
        frame, seen, innermost = int(operation._find(r"stack_frame_id=(\d+)") or 0), set(), ""
        while frame in self.frames and frame not in seen:
            seen.add(frame)
            file, line_number, parent = self.frames[frame]
            if not any(part in file for part in _OUTSIDE):
                return f"{file}:{line_number}"
            innermost = innermost or f"{file}:{line_number}"
            frame = parent
        return innermost

    def trip_count(self, loop: Operation, computation: Computation) -> int | None:
        """How often the body of a ``while`` of a computation runs; None if the text does not say.

        A GPU's compiler writes it down. Elsewhere it is N in the condition ``i < N``, less what ``i`` starts at.
        """
        if found := _TRIPS.search(loop.backend_config):
            return int(found[1])
        condition = self.computations.get(loop.attribute("condition").lstrip("%"))
        bound = _find_bound(self, condition) if condition else None
        if bound is None:
            return None
        limit, index = bound
        return max(0, limit - _find_start(computation, loop, index))

    @functools.cached_property
    def callers(self) -> Mapping[str, tuple[Computation, Operation]]:
        """Who calls a computation, by its name; the last one, where there are several."""
        return {name: (computation, operation) for computation, operation in self.walk() for name in operation.called}

    def walk(self) -> Iterator[tuple[Computation, Operation]]:
        """All operations of all computations."""
        for computation in self.computations.values():
            for operation in computation.operations:
                yield computation, operation


def _find_bound(module: Module, condition: Computation) -> tuple[int, int] | None:
    """N and the place of ``i`` among what the loop carries, where the condition is ``i < N``, alone or in a fusion."""
    root, known = condition.root, dict(condition.by_name)
    if root.opcode == "fusion" and root.called:
        inner = module.computations[root.called[0]]
        known |= inner.by_name
        known |= {p.name: condition.by_name[x] for p, x in zip(inner.parameters, root.operands, strict=True)}
        root = inner.root
    if root.opcode != "compare" or root.attribute("direction") not in ("LT", "GT"):
        return None
    small, large = root.operands if root.attribute("direction") == "LT" else root.operands[::-1]
    limit, index = known[large], known[small]
    if limit.opcode != "constant" or index.opcode != "get-tuple-element":
        return None
    return int(limit.given), int(index.attribute("index"))


def _find_start(computation: Computation, loop: Operation, index: int) -> int:
    """What a number that a loop carries is at first; 0 if that is no constant."""
    carried = computation.by_name[loop.operands[0]]
    if carried.opcode != "tuple":
        return 0
    first = computation.by_name[carried.operands[index]]
    while first.opcode in ("copy", "bitcast"):
        first = computation.by_name[first.operands[0]]
    return int(first.given) if first.opcode == "constant" and first.given.lstrip("-").isdigit() else 0


def parse_module(text: str) -> Module:
    """The module that ``compiled.as_text()`` shows."""
    computations: dict[str, Computation] = {}
    lines: list[str] = []
    tables: list[str] = []
    header, entry, name, is_entry, inside = "", "", "", False, False
    for line in text.splitlines():
        if not inside:
            if line.endswith("{") and (found := _COMPUTATION.match(line)):
                is_entry, name, lines, inside = bool(found[1]), found[2], [], True
            elif line.startswith("HloModule"):
                header = line[len("HloModule ") :].split(",", 1)[0]
            elif line:
                tables.append(line)
        elif line == "}":
            computations[name] = Computation(name=name, operations=tuple(map(parse_operation, lines)))
            entry, inside = name if is_entry else entry, False
        elif _HEAD.match(line):
            lines.append(line)
        elif lines:  # a backend configuration can go over several lines
            lines[-1] += "\n" + line
    return Module(name=header, entry=computations[entry], computations=computations, frames=_parse_frames(tables))


def parse_operation(line: str) -> Operation:
    """One line of a computation."""
    head = _HEAD.match(line)
    assert head is not None, line
    start = head.end()
    end = _matching(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", end)
    closing = _matching(line, opening)
    given, rest = line[opening + 1 : closing], line[closing + 1 :]
    attributes, _, backend_config = rest.partition(", backend_config=")
    opcode = line[end:opening].strip()
    return Operation(
        name=head[2],
        opcode=opcode,
        results=parse_arrays(line[start:end]),
        operands=() if opcode in ("constant", "parameter") else tuple(_NAMES.findall(given)),
        given=given if opcode in ("constant", "parameter") else "",
        attributes=attributes,
        backend_config=backend_config,
        is_root=bool(head[1]),
    )


_BRACKET = re.compile(r"[()]")


def _matching(line: str, opening: int) -> int:
    """Where the bracket that opens there is closed."""
    depth = 0
    for found in _BRACKET.finditer(line, opening):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    return len(line) - 1


_FRAME = re.compile(r"(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}")
_LOCATION = re.compile(r"(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+) ")
_FILE = re.compile(r'(\d+) "(.*)"$')


def _parse_frames(tables: Sequence[str]) -> dict[int, tuple[str, int, int]]:
    """File, line and calling frame by frame. The text counts a frame's caller from one: what it calls n is n - 1."""
    files: dict[int, str] = {}
    locations: dict[int, tuple[str, int]] = {}
    frames: dict[int, tuple[str, int, int]] = {}
    section = ""
    for line in tables:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = line
        elif section == "FileNames" and (found := _FILE.match(line)):
            files[int(found[1])] = found[2]
        elif section == "FileLocations" and (found := _LOCATION.match(line)):
            locations[int(found[1])] = (files.get(int(found[2]), ""), int(found[3]))
        elif section == "StackFrames" and (found := _FRAME.match(line)):
            file, line_number = locations.get(int(found[2]), ("", 0))
            frames[int(found[1])] = (file, line_number, int(found[3]) - 1)
    return frames
