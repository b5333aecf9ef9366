"""Seed -> findings of many programs: runs them, shrinks what fails, and says what was covered."""

import collections
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import tests.fuzz.blocks  # noqa: F401 - registers the blocks
from pegprof.engine.rules import strategies
from tests.fuzz.check import Case, Discarded, check, draw_case, tolerance
from tests.fuzz.grammar import BLOCKS, WEIGHTS, Misfit, Program, draw_program

PROGRESS_S = 30.0
SHRINK_S = 40.0
CLEAR_EVERY = 40  # programs: what jax keeps of each is a few MB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A program that is wrong, as small as it was found to stay wrong."""

    number: int
    program: Program
    case: Case
    wrong: dict[str, str]
    command: str
    shrunk_command: str

    def __str__(self) -> str:
        what = "\n".join(f"{name}: {text}" for name, text in self.wrong.items())
        return "\n".join(
            [
                f"---- program {self.number} is wrong",
                str(self.program),
                f"  {self.case}",
                what.rstrip(),
                f"replay: {self.command}",
                f"shrunk: {self.shrunk_command}",
            ]
        )


class Session:
    """Programs one after the other, and what came of them."""

    def __init__(self, *, seed: int, shrink: bool = True):
        self.seed, self.shrink = seed, shrink
        self.programs = 0
        self.discarded: collections.Counter[str] = collections.Counter()
        self.failures: list[Failure] = []
        self.miscompiled: list[str] = []  # commands: the loop or the engine is wrong only as XLA compiles it
        self.used: collections.Counter[str] = collections.Counter()
        self.strategies: collections.Counter[str] = collections.Counter()
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        print(text, flush=True)  # noqa: T201 - a command

    def run(self, until: float) -> None:
        """Programs until the time is up."""
        said = time.monotonic()
        while time.monotonic() < until:
            self.run_one(self.programs)
            if self.programs % CLEAR_EVERY == 0:
                jax.clear_caches()
            if time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                self.say(self.progress())

    def run_one(self, number: int) -> None:
        self.programs += 1
        try:
            program = draw_program(self.seed + number)
            case = draw_case(program)
            findings = check(program, case)
        except Discarded as error:
            self.discarded[str(error).splitlines()[0][:150]] += 1
            return
        self.used.update(program.used)
        self.strategies.update(findings.strategies)
        if not findings.wrong:
            return
        if right_without_compiler(program, case):
            self.miscompiled.append(self.replay_command(number))
            self.say(f"wrong as compiled, right one operation at a time: {self.miscompiled[-1]}")
            return
        if not plain_vmap_is_right(program, case):
            self.miscompiled.append(self.replay_command(number))
            self.say(f"wrong by jax.vmap alone, without pegprof: {self.miscompiled[-1]}")
            return
        failure = self.failure(number, program, case, findings.wrong)
        self.failures.append(failure)
        self.say(str(failure))

    def replay_command(self, number: int) -> str:
        return f"python -m tests.fuzz --seed {self.seed} --program {number}"

    def failure(self, number: int, program: Program, case: Case, wrong: dict[str, str]) -> Failure:
        command = self.replay_command(number)
        shrunk, plain = program, []
        if self.shrink:
            shrunk, case, plain, wrong = shrink(program, case, wrong, until=time.monotonic() + SHRINK_S)
        shorter = command
        if shrunk.positions != program.positions:
            shorter += f" --keep {','.join(map(str, shrunk.positions)) or 'none'}"
        if plain:
            shorter += f" --plain {','.join(plain)}"
        return Failure(
            number=number,
            program=shrunk,
            case=case,
            wrong=wrong,
            command=command,
            shrunk_command=shorter,
        )

    def progress(self) -> str:
        elapsed = time.monotonic() - self.started
        covered = len([name for name in BLOCKS if self.used[name]])
        return (
            f"{elapsed:.0f} s: {self.programs} programs, {sum(self.discarded.values())} discarded, "
            f"{len(self.failures)} wrong, {len(self.miscompiled)} miscompiled, {covered} of {len(BLOCKS)} blocks"
        )

    def summary(self) -> str:
        lines = ["", "block                     programs"]
        lines += [f"{name:24}  {self.used[name]:8}" for name in BLOCKS]
        lines += ["", "weight                    programs"]
        lines += [f"{name:24}  {self.used[f'weight:{name}']:8}" for name in WEIGHTS]
        lines += ["", "strategy                parameters"]
        lines += [f"{name:24}  {self.strategies[name]:8}" for name in (*strategies(), "constant")]
        lines += ["", *(f"discarded {n}: {why}" for why, n in self.discarded.most_common())]
        lines += [f"miscompiled: {command}" for command in self.miscompiled]
        lines += [f"wrong: {failure.shrunk_command}" for failure in self.failures]
        return "\n".join([*lines, f"seed {self.seed}", self.progress()])


def right_without_compiler(program: Program, case: Case) -> bool:
    """Whether a program is right if nothing but scans and branches is compiled as a whole, the loop neither.

    The Jaxprs are the same either way. So a difference is XLA's, which compiles in a hurry here: a bug, or a maximum
    whose gradient compares two roundings of one value.
    """
    try:
        return not check(program, dataclasses.replace(case, eager=True)).wrong
    except Discarded:
        return False


def plain_vmap_is_right(program: Program, case: Case) -> bool:
    """Whether ``jax.vmap`` of the loss, without pegprof, gives the losses that the examples have one at a time."""
    params, batch = jax.tree.map(jax.numpy.asarray, (program.params, program.batch))
    batch = jax.tree.map(lambda x: x[: case.B], batch)

    def loss(example: Any) -> Any:
        if program.keep_batch_dim:
            example = jax.tree.map(lambda x: x[None], example)
        return program.loss(params, example)

    alone = [loss(jax.tree.map(lambda x, i=i: x[i], batch)) for i in range(case.B)]
    try:
        together = jax.vmap(loss)(batch)
    except Exception:  # what cannot be batched says nothing about batching
        return True
    return np.allclose(together, np.asarray(alone), rtol=tolerance(program), atol=tolerance(program))


def shrink(
    program: Program, case: Case, wrong: dict[str, str], until: float
) -> tuple[Program, Case, list[str], dict[str, str]]:
    """A smaller program that is still wrong: blocks are dropped one by one, options of the case made plain."""
    plain: list[str] = []

    def still_wrong(smaller: Program, simpler: Case) -> dict[str, str]:
        if time.monotonic() > until:
            return {}
        try:
            return check(smaller, simpler).wrong
        except (Discarded, Misfit):
            return {}

    for position in program.positions:
        try:
            smaller = draw_program(program.seed, keep=[p for p in program.positions if p != position])
        except Misfit:
            continue
        if found := still_wrong(smaller, case):
            program, wrong = smaller, found
    for field in dataclasses.fields(Case):
        if getattr(case, field.name) == field.default:
            continue
        simpler = case.reset([field.name])
        if found := still_wrong(program, simpler):
            case, wrong = simpler, found
            plain.append(field.name)
    return program, case, plain, wrong


def replay(seed: int, number: int, *, keep: Sequence[int] | None = None, plain: Sequence[str] = ()) -> int:
    """Run one program again, and say all of it. The exit code is that of the command."""
    program = draw_program(seed + number, keep=keep)
    case = draw_case(program).reset(plain)
    out = sys.stdout
    out.write(f"{program}\n  {case}\n")
    try:
        wrong = check(program, case).wrong
    except Discarded as error:
        out.write(f"discarded: {error}\n")
        return 0
    out.writelines(f"{name}: {text}\n" for name, text in wrong.items())
    out.write("wrong\n" if wrong else "right\n")
    return 1 if wrong else 0
