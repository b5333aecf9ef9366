"""The child of ``accelerators.py``: one method compiled for one target, as text, with XLA's bytes.

Runs as ``python -m benchmarks.children.compile_text`` in the environment of its target. What a compiler once answered
is kept in a folder, by the program's text: the compiled text itself, so that a better estimator needs no new compile.
"""

import dataclasses
import gzip
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from pegprof.engine.statistics import resolve as resolve_stats
from pegprof.measure.worker import compiling, main, methods, programs
from pegprof.measure.worker.main import Reporter
from pegprof.measure.worker.place import Place, memory_bytes, parse_refusal
from pegprof.models.problem import Problem, load_problem
from pegprof.targets.cache import Entry
from pegprof.targets.compilers import Compiler
from pegprof.targets.hlo.compiler_prices import GPU_OPTIONS

Answer = dict[str, Any]

NO_TABLE = "Cannot find key: sm_"
"""What XLA says where it has no table of matrix products for a GPU, without which it has no prices: before sm_90."""


def compile_text(request: dict[str, Any], reporter: Reporter) -> None:
    """The compiled text goes to the file ``request["text"]``; bytes, or why it was refused, into the answer."""
    problem, place = load_problem(request["model"], request["options"]), Place(request["device"])
    assert place.device is not None
    method, batch, budget = methods.METHODS[request["method"]], request["batch"], None
    if request["microbatch"] == "auto":
        budget = compiling.OPTIMISM * place.device.memory_bytes  # what is foreseen is more than a compiler needs
    size = request["microbatch"] if isinstance(request["microbatch"], int) else None
    options = methods.Options(
        stats=resolve_stats(request["stats"]),
        microbatch_size=size or 1,
        backend=request["backend"],
        memory_budget=budget,
        surgery_size=size,
    )
    while True:
        about = programs.describe_program(method, problem, options, batch)
        reporter.update(note="; ".join(about.notes), microbatch=about.microbatch_size)
        answer = _compile(place, programs.make_program(method, problem, options), problem, request)
        fits = not answer.get("refused") and answer["peak_bytes"] <= place.device.memory_bytes
        smaller = None if fits or budget is None else _plan_smaller(problem, options, batch, about)
        if smaller is None:
            break
        options = smaller
        reporter.update(progress=f"{about.microbatch_size} at a time do not fit, trying fewer")
    reporter.update(**answer, dtype=_dtype_of(problem), jax=jax.__version__)


def _plan_smaller(
    problem: Problem, options: methods.Options, batch: int, about: methods.About
) -> methods.Options | None:
    """A budget with which surgery's planner takes fewer examples at a time; None if it cannot."""
    if about.plan is None:
        return None
    foreseen = next(s.bytes for s in about.plan.schedules if s.microbatch_size == about.plan.microbatch_size)
    smaller = dataclasses.replace(options, memory_budget=int(foreseen) - 1)
    plan = methods.plan_surgery(problem, smaller, batch)
    return smaller if plan.microbatch_size < about.plan.microbatch_size else None


def _compile(place: Place, program: programs.Program, problem: Problem, request: Mapping[str, Any]) -> Answer:
    assert place.device is not None
    start_s = time.perf_counter()
    arguments = program.abstract_arguments(problem, request["batch"])
    lowered = program.jit().lower(*map(place.put, arguments))
    text = Path(request["text"])
    known = _Known.of(request["cache"], lowered.as_text(), place)
    if known and (answer := known.read(text)):
        return {**answer, "from_cache": True}
    answer = _compile_somehow(lowered, place.device.compiler, text)
    answer["compile_s"] = time.perf_counter() - start_s
    if known:
        known.write(answer, text)
    return answer


def _compile_somehow(lowered: Any, compiler: Compiler, text: Path) -> Answer:
    """With all that is wanted, else without what the compiler fails at; ``second_try`` says what that is."""
    options: dict[str, Any] = dict(GPU_OPTIONS) if compiler.backend == "gpu" else {}
    second, first = compiler.second_try, None
    notes: list[str] = []
    while True:
        try:
            return {**_compile_once(lowered, options, text), "second_try": ", ".join(notes)}
        except jax.errors.JaxRuntimeError as error:
            first = first or error
            if NO_TABLE in str(error) and GPU_OPTIONS.keys() <= options.keys():
                options = {name: value for name, value in options.items() if name not in GPU_OPTIONS}
                notes.append("the compiler has no prices for this GPU")
            elif second and not second.options.keys() <= options.keys():
                options |= second.options
                notes.append(second.note)
            else:
                raise first from None


def _compile_once(lowered: Any, options: Mapping[str, Any], text: Path) -> Answer:
    try:
        compiled = lowered.compile(dict(options))
    except jax.errors.JaxRuntimeError as error:
        if found := parse_refusal(str(error)):
            return {"refused": True, "peak_bytes": found[0], "available_bytes": found[1]}
        raise
    text.write_text(compiled.as_text(), encoding="utf-8")
    return dict(memory_bytes(compiled))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Known:
    """The place of one compiled program in the cache."""

    path: Path

    @classmethod
    def of(cls, folder: str | None, program: str, place: Place) -> "_Known | None":
        """Named as ``targets/cache.py`` names it: by program, device, versions and flags."""
        if folder is None or place.device is None:
            return None
        name = hashlib.sha256(f"{Entry.of(program, place.device).path.name} {GPU_OPTIONS}".encode()).hexdigest()
        return cls(path=Path(folder, f"{name}.json.gz"))

    def read(self, text: Path) -> Answer | None:
        try:
            with gzip.open(self.path, "rt", encoding="utf-8") as file:
                answer: Answer = json.load(file)
        except (OSError, EOFError, ValueError):
            return None
        if program := answer.pop("program"):
            text.write_text(program, encoding="utf-8")
        return answer

    def write(self, answer: Answer, text: Path) -> None:
        program = "" if answer.get("refused") else text.read_text(encoding="utf-8")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        with gzip.open(draft, "wt", encoding="utf-8") as file:
            json.dump({**answer, "program": program}, file)
        draft.replace(self.path)


def _dtype_of(problem: Problem) -> str:
    largest = max(jax.tree.leaves(problem.abstract_params()), key=lambda x: x.size)
    return str(problem.options.get("dtype") or largest.dtype.name)


if __name__ == "__main__":
    main.serve(lambda name: {"compile_text": compile_text}[name])
