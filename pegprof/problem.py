"""Problem: a model as pegprof sees it, and ``load_problem``, which finds one by name.

A spec is the name of a model of the zoo (``mlp``), or ``package.module:name`` or ``path/file.py:name``, where name
is a ``Problem`` or a function that returns one. Options, as strings from the command line or as values, become the
fields of a zoo model's config or the keyword arguments of that function.

The zoo has no registry: a name is a key of the ``CONFIGS`` of a file in ``model_zoo``. Names are read from the source
text, so that listing them costs no import of jax; jax is imported by the first method that needs it.
"""

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pegprof.errors import PegprofError, nearest


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
      spec: a zoo name, ``package.module:name`` or ``path/file.py:name``.
      options: values by name; a string is converted to the type of the option's default.

    Returns:
      The Problem, with the options in effect. Nothing is allocated.

    Raises:
      PegprofError: the spec names nothing, an option is wrong, or the user's file is.

    >>> load_problem("mlp", {"width": "64"}).options["width"]
    64
    """
    source, _, name = spec.rpartition(":")
    if source:
        return _load_user_problem(source, name, options or {})
    if spec.endswith(".py"):
        raise PegprofError(f"{spec!r} does not say which Problem of the file", hint=f"write {spec}:name")
    return _load_zoo_problem(spec, options or {})


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


def _load_zoo_problem(name: str, given: Mapping[str, Any]) -> Problem:
    modules = _zoo_modules()
    if name not in modules:
        hint = f"{nearest(name, modules)} (a model of your own is file.py:name or package.module:name)"
        raise PegprofError(f"there is no model {name!r}", hint=hint)
    family = importlib.import_module(modules[name])
    config = family.CONFIGS[name]
    # The options of a family are the fields of its Config; their defaults are this entry's values.
    fields = inspect.signature(type(config)).parameters
    known = {key: field.replace(default=getattr(config, key)) for key, field in fields.items()}
    config = dataclasses.replace(config, **_convert_options(given, known, where=name))
    problem: Problem = family.make_problem(name, config)
    return problem


# A user's own file or module.


def _load_user_problem(source: str, name: str, given: Mapping[str, Any]) -> Problem:
    if source.endswith(".py"):
        file = Path(source)
        if not file.is_file():
            raise PegprofError(f"there is no file {source!r}")
        with _users_code(source):
            module = _import_file(file)
    else:
        with _users_code(_module_file(source)):
            module = importlib.import_module(source)
    where = module.__file__ or source
    found = getattr(module, name, None)
    if isinstance(found, Problem):
        if given:
            hint = f"make {name} a function that takes {', '.join(given)} and returns the Problem"
            raise PegprofError(f"{name} is a Problem: it takes no options", where=where, hint=hint)
        return found
    if not callable(found):
        what = f"there is no {name!r} here" if found is None else f"{name} is neither a Problem nor a function"
        candidates = [key for key, value in vars(module).items() if _could_be_meant(value, module)]
        hint = nearest(name, candidates) if candidates else "define a pegprof.Problem, or a function that returns one"
        raise PegprofError(what, where=where, hint=hint)
    return _call(found, name, given)


def _call(fn: Callable[..., Any], name: str, given: Mapping[str, Any]) -> Problem:
    """The Problem that a user's function returns, with the options that it was made with."""
    code = inspect.unwrap(fn).__code__ if inspect.isfunction(inspect.unwrap(fn)) else None
    file = code.co_filename if code else name
    where = f"{file}:{code.co_firstlineno}" if code else name
    known = inspect.signature(fn).parameters
    options = _convert_options(given, known, where=where)
    missing = [key for key, option in known.items() if key not in options and _is_required(option)]
    if missing:
        hint = " ".join(f"--set {key}=..." for key in missing)
        raise PegprofError(f"{name} needs a value for {', '.join(missing)}", where=where, hint=hint)
    with _users_code(file):
        problem = fn(**options)
    if not isinstance(problem, Problem):
        what = f"{name} returned {type(problem).__name__}, not a Problem"
        raise PegprofError(what, where=where, hint="return pegprof.Problem(name=..., init=..., loss=..., batch=...)")
    defaults = {key: option.default for key, option in known.items() if option.default is not option.empty}
    return dataclasses.replace(problem, options={**defaults, **options, **problem.options})


def _import_file(file: Path) -> ModuleType:
    """Runs a file as ``python file.py`` would find it: its own folder comes first on the path."""
    _put_on_path(file.parent)
    name = f"pegprof_user_{file.stem}"  # a prefix, so that a user's optax.py does not become optax
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None  # the name ends with .py
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module_file(module: str) -> str:
    """The file that a module would be imported from; the current folder counts, as it does for ``python -m``."""
    _put_on_path(Path.cwd())
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the parent package is missing
        spec = None
    if spec is None:
        raise PegprofError(f"there is no module {module!r}", hint="for a file, write path/file.py:name")
    return spec.origin or module


def _put_on_path(folder: Path) -> None:
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))


@contextlib.contextmanager
def _users_code(file: str) -> Iterator[None]:
    """Runs a user's code: what it prints goes to stderr, what it raises names its own file and line."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for data
            yield
    except PegprofError:
        raise
    except SyntaxError as error:
        where = f"{error.filename or file}:{error.lineno}"
        raise PegprofError(f"syntax error: {error.msg}", where=where) from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == Path(file).resolve()]
        where = f"{file}:{lines[-1]}" if lines else file
        raise PegprofError(f"{type(error).__name__}: {error}", where=where) from error


def _could_be_meant(value: Any, module: ModuleType) -> bool:
    return isinstance(value, Problem) or (inspect.isfunction(value) and value.__module__ == module.__name__)


# Options.


def _parse_bool(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


_PARSERS: dict[type, Callable[[str], Any]] = {bool: _parse_bool, int: int, float: float, str: str}


def _convert_options(given: Mapping[str, Any], known: Mapping[str, inspect.Parameter], *, where: str) -> dict[str, Any]:
    """The given options, each as the type of its default."""
    unknown = [key for key in given if key not in known]
    if unknown:
        hint = nearest(unknown[0], known) if known else "it takes none"
        raise PegprofError(f"unknown option {unknown[0]!r}", where=where, hint=hint)
    return {key: _convert(value, known[key], where=where) for key, value in given.items()}


def _convert(value: Any, option: inspect.Parameter, *, where: str) -> Any:
    # The default says the type; where it is None or missing, the annotation does, as in ``width: int | None = None``.
    types = (type(option.default), option.annotation, *typing.get_args(option.annotation))
    kind = next((kind for kind in types if isinstance(kind, type) and kind in _PARSERS), None)
    if kind is None:
        return value
    try:
        converted = _PARSERS[kind](str(value))
    except (ValueError, KeyError) as error:
        hint = "true or false" if kind is bool else f"like {option.default!r}"
        what = f"option {option.name}={value} is not of type {kind.__name__}"
        raise PegprofError(what, where=where, hint=hint) from error
    choices = typing.get_args(option.annotation) if typing.get_origin(option.annotation) is typing.Literal else ()
    if choices and converted not in choices:
        raise PegprofError(f"option {option.name} cannot be {value!r}", where=where, hint=nearest(str(value), choices))
    return converted


def _is_required(option: inspect.Parameter) -> bool:
    named = option.kind in (option.POSITIONAL_OR_KEYWORD, option.KEYWORD_ONLY)
    return named and option.default is option.empty
