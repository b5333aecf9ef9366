"""Problem: a model as pegprof sees it, and ``load_problem``, which finds one by name.

A spec is the name of a model of the zoo (``mlp``) or of one that an installed package offers, or
``package.module:name`` or ``path/file.py:name``; ``own_models.py`` says what such a name may hold. Options, as strings
from the command line or as values, become the fields of a zoo model's config or the keyword arguments of a function.

The zoo has no registry: a name is a key of the ``CONFIGS`` of a file in ``model_zoo``. Names are read from the source
text, so that listing them costs no import of jax; jax is imported by the first method that needs it.
"""

import ast
import contextlib
import contextvars
import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pegprof.errors import PegprofError, nearest
from pegprof.models.options import convert_options

MOST_NAMES = 8
"""Of a file, that a hint lists."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, its loss and its data.

    Args:
      name: how reports call it.
      init: ``init(key) -> params``.
      loss: ``loss(params, batch) -> scalar``, the mean over the leading axis of every leaf of ``batch``.
      batch: ``batch(key, B) -> batch`` of B examples.
      description: one line for a person.
      options: the options in effect, by name.
      keep_batch_dim: False where ``loss`` also takes a bare example, one without its leading axis.
      sharding: ``sharding(params, mesh) -> specs``, how parameters lie on a mesh: a tree like ``params``, or a prefix
        of one, of ``jax.P`` or ``jax.NamedSharding``. ``params`` are abstract. ``mesh`` has the axes ``data``, ``fsdp``
        and ``model``; an axis that ``--mesh`` leaves out has size 1. Without a function each parameter is sharded over
        its largest axes.

    >>> import jax
    >>> problem = Problem(
    ...     name="linear",
    ...     init=lambda key: jax.numpy.zeros(3),
    ...     loss=lambda w, x_BxD: jax.numpy.mean(x_BxD @ w),
    ...     batch=lambda key, B: jax.random.normal(key, (B, 3)),
    ... )
    >>> problem.abstract_batch(8).shape
    (8, 3)
    """

    name: str
    init: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]
    batch: Callable[[Any, int], Any]
    description: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keep_batch_dim: bool = True
    sharding: Callable[[Any, Any], Any] | None = None

    def abstract_params(self) -> Any:
        """The shapes and dtypes of the parameters; nothing is allocated and no backend starts."""
        import jax

        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    def abstract_batch(self, B: int) -> Any:
        """The shapes and dtypes of a batch of B examples; nothing is allocated and no backend starts."""
        import jax

        return jax.eval_shape(lambda: self.batch(jax.random.key(0), B))


def zoo_names() -> list[str]:
    """The names of the zoo's models.

    >>> "mlp" in zoo_names()
    True
    """
    return list(_zoo_modules())


def load_problem(spec: str, options: Mapping[str, Any] | None = None) -> Problem:
    """The Problem that a spec names.

    Args:
      spec: the name of a model of the zoo or of an installed package, ``package.module:name`` or ``path/file.py:name``.
      options: values by name; a string is converted to the type of the option's default.

    Returns:
      The Problem, with the options in effect. Nothing is allocated.

    Raises:
      PegprofError: the spec names nothing, an option is wrong, or the user's file is.

    >>> load_problem("mlp", {"width": "64"}).options["width"]
    64
    """
    from pegprof.models import own_models  # which needs Problem

    if (here := _here.get()) is not None and here.name == spec:
        return here
    check_spec(spec)
    source, _, name = spec.rpartition(":")
    if source:
        return own_models.load(source, name, options or {})
    zoo = _zoo_modules()
    if spec in zoo:  # a model that another package offers under the same name is found as package.module:name only
        return _load_zoo_problem(spec, zoo[spec], options or {})
    return own_models.load_offered(spec, own_models.offered()[spec], options or {})


# The problem of a notebook, for as long as it is measured.
_here: contextvars.ContextVar[Problem | None] = contextvars.ContextVar("_here", default=None)


@contextlib.contextmanager
def provided(problem: Problem) -> Iterator[None]:
    """While it lasts, ``load_problem`` gives this one: that of a notebook, which cannot be loaded by its name."""
    token = _here.set(problem)
    try:
        yield
    finally:
        _here.reset(token)


def check_spec(spec: str) -> None:
    """Raises if a spec names nothing, as far as that can be told without importing jax or the user's code."""
    from pegprof.models import own_models  # which needs Problem

    source, colon, name = spec.rpartition(":")
    if source.endswith(".py") and not Path(source).is_file():
        raise PegprofError(f"there is no file {source!r}")
    if (colon and not name) or spec.endswith(".py"):
        file = Path(spec.removesuffix(":"))
        names = own_models.names_in(file) if file.suffix == ".py" else []
        specs = [f"{file}:{name}" for name in names[:MOST_NAMES]] or [f"{file}:name"]
        what = f"{spec!r} does not say which name holds the model"
        raise PegprofError(
            what, hint=f"write {' or '.join([', '.join(specs[:-1]), specs[-1]] if specs[1:] else specs)}"
        )
    if colon or spec in (names := [*zoo_names(), *own_models.offered()]):
        return
    hint = f"{nearest(spec, names)} (a model of your own is file.py:name or package.module:name)"
    raise PegprofError(f"there is no model {spec!r}", hint=hint)


# The zoo.


def _zoo_modules() -> dict[str, str]:
    """From each zoo name to the module that makes it."""
    package = importlib.util.find_spec("model_zoo")
    assert package is not None  # installed with pegprof
    files = sorted(file for folder in package.submodule_search_locations or () for file in Path(folder).glob("*.py"))
    return {name: f"model_zoo.{file.stem}" for file in files for name in _config_names(file)}


def _config_names(file: Path) -> Iterator[str]:
    """The keys of a file's ``CONFIGS = {...}``, from its text."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="CONFIGS")], value=ast.Dict(keys=keys)):
                yield from (ast.literal_eval(key) for key in keys if key is not None)


def _load_zoo_problem(name: str, module: str, given: Mapping[str, Any]) -> Problem:
    family = importlib.import_module(module)
    config = family.CONFIGS[name]
    # The options of a family are the fields of its Config; their defaults are this entry's values.
    fields = inspect.signature(type(config)).parameters
    known = {key: field.replace(default=getattr(config, key)) for key, field in fields.items()}
    config = dataclasses.replace(config, **convert_options(given, known, where=name))
    problem: Problem = family.make_problem(name, config)
    return problem
