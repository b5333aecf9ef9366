"""What an operation moves: bytes that it reads from main memory and writes to it.

An operation reads its operands and writes its results, once each, with these exceptions. A slice or a gather reads
what it takes. An update in place reads and writes what it updates. What lies in another memory than the main one costs
nothing. The same holds inside a fusion, for each of its operands: it is followed to those who use it.
"""

from collections.abc import Iterator

from pegprof.targets.hlo.module import Computation, Module, Operation

FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id",
    "opt-barrier", "optimization-barrier", "domain", "add-dependency", "while", "conditional", "call",
}  # fmt: skip
SLICES = {"slice", "dynamic-slice", "gather"}
SAME_ENTRIES = {"bitcast", "reshape", "transpose", "convert", "copy", "bitcast-convert"}
NO_TRAFFIC = {"AllocateBuffer", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked", "Sharding"}
WITH_WORKSPACE = ("__cublas$", "__cudnn$")  # libraries that need memory to work in, which is a result beside the first


def moved_bytes(module: Module, computation: Computation, operation: Operation) -> int:
    """To and from main memory, when the operation runs once."""
    opcode = operation.opcode
    if opcode in FREE or opcode.endswith("-done") or operation.custom_call_target in NO_TRAFFIC:
        return 0
    if opcode == "copy-start":
        return sum(array.main_bytes for array in operation.results)  # target, source, and a flag elsewhere
    operands = computation.operands(operation)
    if opcode in ("slice-start", "dynamic-slice-start"):
        source, target = operation.results[0], operation.results[-2]
        return target.main_bytes + (0 if source.space else target.bytes)
    if opcode == "fusion":
        fused = module.computations[operation.called[0]]
        pairs = zip(operands, fused.parameters, strict=True)
        read = sum(main_bytes(x) * share_read(module, fused, inner) for x, inner in pairs)
        written = zip(operation.results, roots(fused), strict=True)
        return round(read + sum(array.main_bytes * share_written(fused, root) for array, root in written))
    if opcode in SLICES:
        read = operation.bytes if main_bytes(operands[0]) else 0
        return read + main_bytes(operation) + sum(map(main_bytes, operands[1:]))
    if opcode == "dynamic-update-slice":
        return main_bytes(operands[1]) + (operands[1].bytes if main_bytes(operation) else 0)
    if opcode == "scatter":
        return round(_scatter_share(computation, operation) * 2 * main_bytes(operation)) + sum(
            map(main_bytes, operands[1:])
        )
    if opcode.endswith("-start") and operation.called:
        inner = module.computations[operation.called[0]]
        return sum(moved_bytes(module, inner, each) for each in inner.operations)
    results = operation.results[:1] if operation.custom_call_target.startswith(WITH_WORKSPACE) else operation.results
    return sum(array.main_bytes for array in results) + sum(map(main_bytes, dict.fromkeys(operands)))


def main_bytes(operation: Operation) -> int:
    """What of an operation's results lies in main memory."""
    return sum(array.main_bytes for array in operation.results)


def roots(computation: Computation) -> tuple[Operation, ...]:
    """The results of a fusion, one for each array."""
    root = computation.root
    parts = computation.operands(root) if root.opcode == "tuple" else (root,)
    return tuple(part for part in parts for _ in part.results)


def share_read(module: Module, computation: Computation, value: Operation) -> float:
    """Which part of a value the fused operations read, at most all of it once."""
    size = sum(array.size for array in value.results) or 1
    return min(1.0, sum(_read_by_users(module, computation, value)) / size)


def _read_by_users(module: Module, computation: Computation, value: Operation) -> Iterator[float]:
    """Entries, user by user."""
    size = sum(array.size for array in value.results)
    users = computation.users.get(value.name, ())
    if not users and value.is_root:
        yield size
    for user, index in users:
        if user.opcode in SLICES and index == 0:
            yield user.results[0].size
        elif user.opcode == "dynamic-update-slice" and index == 0:
            yield 0.0 if leads_to_root(computation, user) else size
        elif user.opcode == "scatter" and index == 0:
            yield _scatter_share(computation, user) * size
        elif user.opcode in SAME_ENTRIES:
            yield from _read_by_users(module, computation, user)
        elif user.opcode == "fusion":
            inner = module.computations[user.called[0]]
            yield size * share_read(module, inner, inner.parameters[index])
        elif user.opcode == "tuple" and value.opcode == "parameter":
            yield 0.0  # handed on as it is
        else:
            yield size


def share_written(computation: Computation, root: Operation) -> float:
    """Which part of a fusion's result is written: the update, where it is made in place."""
    if root.opcode == "parameter":
        return 0.0  # handed on as it is
    while root.opcode in SAME_ENTRIES:
        root = computation.by_name[root.operands[0]]
    size = sum(array.size for array in root.results) or 1
    if root.opcode == "dynamic-update-slice" and _comes_from_outside(computation, root):
        return computation.by_name[root.operands[1]].results[0].size / size
    if root.opcode == "scatter" and _comes_from_outside(computation, root):
        return _scatter_share(computation, root)
    return 1.0


def leads_to_root(computation: Computation, operation: Operation) -> bool:
    """Whether a fusion's result is the operation's, in another shape or layout at most."""
    if operation.is_root:
        return True
    users = computation.users.get(operation.name, ())
    return any(
        user.opcode == "tuple" or (user.opcode in SAME_ENTRIES and leads_to_root(computation, user))
        for user, _ in users
    )


def _comes_from_outside(computation: Computation, update: Operation) -> bool:
    """Whether what is updated is a buffer that was there before, so that the rest of it need not be written."""
    updated = computation.by_name[update.operands[0]]
    while updated.opcode in SAME_ENTRIES:
        updated = computation.by_name[updated.operands[0]]
    return updated.opcode == "parameter"


def _scatter_share(computation: Computation, scatter: Operation) -> float:
    """Entries that a scatter updates, as a part of those that it could."""
    arrays = (len(scatter.operands) - 1) // 2
    updates = sum(computation.by_name[name].results[0].size for name in scatter.operands[arrays + 1 :])
    return min(1.0, updates / (sum(array.size for array in scatter.results) or 1))
