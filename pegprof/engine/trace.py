"""Loss -> Jaxpr of one example's gradient.

In: a loss, its arguments (arrays or ``jax.ShapeDtypeStruct``) and which of them are parameters and batch.
Out: a ``Trace``: the flat program ``inputs of one example -> value, aux, gradients``, with the names of the parameters.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pegprof.engine.checks.arguments import Loss, batch_size, check_arguments, example_of, explain_failure, split_aux
from pegprof.engine.jaxpr import ClosedJaxpr
from pegprof.engine.mesh import Share
from pegprof.engine.options import Options
from pegprof.engine.passes.flatten import flatten
from pegprof.engine.passes.squeeze import squeeze
from pegprof.errors import PegprofError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The gradient of one example as a flat program: inputs -> value, aux, gradients."""

    closed: ClosedJaxpr
    options: Options
    B: int
    names: tuple[str, ...]  # of the parameters, in the order of the gradients
    depends: tuple[bool, ...]  # of each input: is it the example's own
    aux_tree: Any
    gradients_tree: Any

    @property
    def num_aux(self) -> int:
        return self.aux_tree.num_leaves

    @property
    def gradient_names(self) -> dict[int, str]:
        """The parameter of each output that is a gradient."""
        return {1 + self.num_aux + i: name for i, name in enumerate(self.names)}

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter."""
        return tuple(self.closed.out_avals[1 + self.num_aux + self.names.index(name)].shape)

    def split_outputs(self, outputs: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Value, aux and gradients."""
        return outputs[0], list(outputs[1 : 1 + self.num_aux]), list(outputs[1 + self.num_aux :])

    def inputs(self, args: Sequence[Any], share: Share | None = None) -> list[Any]:
        """The inputs for all B examples: what is the example's own has a leading axis of B.

        A device that has a share of the batch takes the keys of its own examples, as if it had all.
        """
        flat = []
        for argnum, arg in enumerate(args):
            if argnum == self.options.prng_argnum:
                keys = jax.random.split(arg, self.B * (share.devices if share else 1))
                arg = keys[share.numbers(self.B)] if share else keys
            elif argnum in self.options.batch and self.options.keep_batch_dim:
                arg = jax.tree.map(lambda x: jnp.expand_dims(x, 1), arg)
            flat += jax.tree.leaves(arg)
        return flat


def trace_example(loss: Loss, args: Sequence[Any], options: Options) -> Trace:
    """Trace the gradient of one example; nothing is computed, so shapes and dtypes are enough."""
    options = options.of(args)
    check_arguments(args, options)
    B = batch_size(args, options)
    example = [example_of(arg, argnum, options) for argnum, arg in enumerate(args)]
    leaves, tree = jax.tree.flatten(example)
    trees: dict[str, Any] = {}

    def value_and_gradients(*flat: Any) -> list[Any]:
        checked = jax.value_and_grad(lambda *args: split_aux(loss(*args), loss, options), options.params, has_aux=True)
        (value, aux), gradients = checked(*jax.tree.unflatten(tree, flat))
        gradients = gradients[0] if isinstance(options.argnums, int) else gradients
        trees["aux"], trees["gradients"] = jax.tree.structure(aux), jax.tree.structure(gradients)
        return [value, *jax.tree.leaves(aux), *jax.tree.leaves(gradients)]

    try:
        closed = jax.make_jaxpr(value_and_gradients)(*leaves)
    except PegprofError:
        raise
    except Exception as error:
        explain_failure(error, loss, args, options)
        raise
    params = args[options.params[0]] if isinstance(options.argnums, int) else tuple(args[i] for i in options.params)
    return Trace(
        closed=squeeze(flatten(closed)),
        options=options,
        B=B,
        names=parameter_names(params),
        depends=tuple(options.differs(i) for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)),
        aux_tree=trees["aux"],
        gradients_tree=trees["gradients"],
    )


def parameter_names(params: Any) -> tuple[str, ...]:
    """A name of its own for each leaf, such as ``layers/0/kernel``; a lone array is ``params``.

    >>> parameter_names({"a": {"b": 1.0}, "a/b": 2.0})
    ('a/b', 'a/b (2)')
    """
    names: dict[str, None] = {}
    for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "params"
        numbered = itertools.chain([name], (f"{name} ({i})" for i in itertools.count(2)))
        names[next(each for each in numbered if each not in names)] = None
    return tuple(names)
