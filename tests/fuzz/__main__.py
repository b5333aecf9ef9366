"""``python -m tests.fuzz``: random programs against the loop, until the time is up.

Exit code 0 if all agree, 1 if any does not. Each failure is printed with the command that replays it.
"""

import argparse
import os
import secrets
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before the first import of jax

import jax

from tests.fuzz.session import Session, replay


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="How long to run.")
    parser.add_argument("--seed", type=int, help="Seed of the first program; a fresh one by default.")
    parser.add_argument("--program", type=int, help="Run this program only, counted from 0.")
    parser.add_argument("--keep", help="Positions of the blocks to keep, as 0,2 or none: a shrunk program.")
    parser.add_argument("--plain", help="Options of the case to reset to their defaults, as backend,forced.")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True, help="Shrink what fails.")
    options = parser.parse_args(arguments)
    with jax.enable_x64(True):
        return run(options)


def run(options: argparse.Namespace) -> int:
    seed = secrets.randbelow(10**9) if options.seed is None else options.seed
    if options.program is not None:
        keep = None if options.keep is None else [int(i) for i in options.keep.split(",") if i.isdigit()]
        plain = [name for name in (options.plain or "").split(",") if name]
        return replay(seed, options.program, keep=keep, plain=plain)
    session = Session(seed=seed, shrink=options.shrink)
    session.say(f"seed {seed}")
    session.run(until=time.monotonic() + options.seconds)
    session.say(session.summary())
    return 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main())
