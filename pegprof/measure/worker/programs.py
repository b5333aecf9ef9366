"""A method, a problem and options in, the program that is compiled and run out: the statistics, or a whole step.

    fn(params, batch) -> statistics                    without a step
    fn(params, state, batch) -> (params, state)        with one: the statistics, the optimizer's update, its result

The old parameters and state are donated to a step, as they are in training: the new ones take their memory, and the
next run goes on from them. What the methods make is wrapped here, once for all of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from pegprof.measure.worker.methods import About, Batch, Method, Options, Params
from pegprof.measure.worker.place import Place
from pegprof.models.problem import Problem
from pegprof.optimizers import BY_NAME, update
from pegprof.result.steps import Step, find_step

LEARNING_RATE = 1e-3  # a number in the program, which changes neither its time nor its memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What runs for a method; ``optimizer`` and what its state ``averages`` are those of a step.

    It is a function of what it holds from run to run, the parameters and with a step the state too, and of a batch.
    """

    fn: Callable[..., Any]
    optimizer: Any = None
    averages: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def jit(self, place: Place | None = None, arguments: Sequence[Any] = ()) -> Any:
        """The program, jitted. On a mesh, for abstract arguments: what has a parameter's shape is sharded as it is."""
        return jax.jit(
            self.fn,
            donate_argnums=(0, 1) if self.optimizer else (),
            **({"out_shardings": self._shardings(place, arguments)} if place and place.mesh is not None else {}),
        )

    def _shardings(self, place: Place, arguments: Sequence[Any]) -> Any:
        results = jax.eval_shape(self.fn, *arguments)
        return place.held_shardings(results) if self.optimizer else place.result_shardings(results)

    def start(self, params: Params) -> tuple[Any, ...]:
        """What the first run holds."""
        return (params, self.optimizer.init(params)) if self.optimizer else (params,)

    def abstract_arguments(self, problem: Problem, B: int) -> tuple[Any, ...]:
        return *jax.eval_shape(self.start, problem.abstract_params()), problem.abstract_batch(B)

    def held_after(self, held: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
        """What the next run holds: what was donated is gone."""
        return tuple(result) if self.optimizer else held

    def statistics(self, result: Any) -> dict[str, Any]:
        """By name; of a step what the state has of them, which is right for the first step alone."""
        if not self.optimizer:
            return dict(result)
        _, state = result
        return {name: optax.tree.get(state, moment) for moment, name in self.averages.items()}


def make_program(method: Method, problem: Problem, options: Options) -> Program:
    """What is to be compiled, from shapes or arrays alike."""
    compute = method.make(problem, options)
    if options.step is None:
        return Program(fn=compute)
    step = step_of(method, options.step)
    optimizer = make_optimizer(step.optimizer)

    def fn(params: Params, state: Any, batch: Batch) -> tuple[Params, Any]:
        updates, state = update(optimizer, compute(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    return Program(fn=fn, optimizer=optimizer, averages=step.averages)


def describe_program(method: Method, problem: Problem, options: Options, B: int) -> About:
    """What there is to know of the method, and which optimizer it runs if that is not the one asked for."""
    about = method.about(problem, options, B)
    if options.step is None or (optimizer := step_of(method, options.step).optimizer) == options.step:
        return about
    return dataclasses.replace(about, notes=(f"a step of {optimizer}, which takes the mean alone",))


def step_of(method: Method, name: str) -> Step:
    """The step that a method takes: a plain one if it has the mean alone."""
    step = find_step(name)
    return find_step(step.plain) if method.mean_alone else step


def make_optimizer(name: str) -> Any:
    return BY_NAME[name](LEARNING_RATE)


def state_bytes(problem: Problem, step: str | None) -> int | None:
    """What an optimizer keeps from step to step; None without one."""
    if step is None:
        return None
    state = jax.eval_shape(make_optimizer(find_step(step).optimizer).init, problem.abstract_params())
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
