"""Models of one's own: ``package.module:name``, ``path/file.py:name``, and those that installed packages offer.

A name may hold

- a ``Problem``;
- an object with ``init``, ``loss`` and ``batch``, and if it likes ``name``, ``description``, ``options`` and
  ``keep_batch_dim``, each meaning what it means for a ``Problem``;
- a function that returns either, or the class of such an object: it is called with the options as keyword arguments.
"""

import ast
import dataclasses
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

from pegprof import search_path
from pegprof.errors import PegprofError, nearest
from pegprof.models.options import convert_options, is_required, options_of
from pegprof.models.problem import Problem
from pegprof.user_code import home_of, line_of, place, users_code

ENTRY_POINTS = "pegprof.models"
"""The group in which packages offer models: each entry is a name, and the ``package.module:name`` it stands for."""


def offered() -> dict[str, list[EntryPoint]]:
    """The models that installed packages offer, by name; where several offer the same name, all of them."""
    offers: dict[str, list[EntryPoint]] = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        offers.setdefault(entry.name, []).append(entry)
    return offers


def package_of(offer: EntryPoint) -> str:
    return offer.dist.name if offer.dist else offer.module


def load_offered(name: str, offers: list[EntryPoint], given: Mapping[str, Any]) -> Problem:
    """The Problem that a package offers under a name; more than one offer is one too many."""
    if len(offers) > 1:
        packages = " and ".join(sorted(package_of(offer) for offer in offers))
        hint = f"write {' or '.join(sorted(offer.value for offer in offers))}"
        raise PegprofError(f"{packages} both offer a model {name!r}", hint=hint)
    return load(offers[0].module, offers[0].attr, given)


def names_in(file: Path) -> list[str]:
    """The names that a file defines and may hold a model, read from its text: functions, classes, variables.

    Raises:
      PegprofError: there is no such file.
    """
    if not file.is_file():
        raise PegprofError(f"there is no file {str(file)!r}")
    with users_code(str(file)):
        statements = ast.parse(file.read_bytes(), filename=str(file)).body
    names = dict.fromkeys(name for statement in statements for name in _names_bound(statement))
    return [name for name in names if not name.startswith("_")]


def load(source: str, name: str, given: Mapping[str, Any]) -> Problem:
    """The Problem that a name in a file or module stands for, with the options in effect."""
    with users_code(source if source.endswith(".py") else ""):
        module = _import_file(Path(source), name) if source.endswith(".py") else _import_module(source)
    found = getattr(module, name, None)
    where = _line_that_binds(name, module)
    if problem := _as_problem(found, name):
        if given:
            hint = f"make {name} a function that takes {', '.join(given)} and returns the Problem"
            raise PegprofError(f"{name} is not a function: it takes no options", where=where, hint=hint)
        return problem
    if callable(found) and not _adapter_for(found):
        return _call(found, name, given, where=where)
    if found is not None:
        what = f"{name} is of type {type(found).__name__}: neither a Problem nor a function"
        raise PegprofError(what, where=where, hint=_hint_about(found))
    candidates = [key for key, value in vars(module).items() if _could_be_meant(value, module)]
    hint = nearest(name, candidates) if candidates else _hint_about(None)
    raise PegprofError(f"there is no {name!r} here", where=where, hint=hint)


_PARTS = ("init", "loss", "batch")


def _as_problem(found: Any, name: str) -> Problem | None:
    """A Problem as it is, or one made of an object that has the parts of one; None for anything else."""
    if isinstance(found, Problem):
        return found
    if isinstance(found, type) or _missing_parts(found):
        return None
    return Problem(
        name=getattr(found, "name", None) or name,
        init=found.init,
        loss=found.loss,
        batch=found.batch,
        description=getattr(found, "description", ""),
        options=getattr(found, "options", {}),
        keep_batch_dim=getattr(found, "keep_batch_dim", True),
        sharding=getattr(found, "sharding", None),
    )


def _missing_parts(found: Any) -> list[str]:
    return [part for part in _PARTS if not callable(getattr(found, part, None))]


def _adapter_for(found: Any) -> str:
    """The function that makes a Problem of a Flax module, by its name; "" for anything else."""
    bases = {f"{base.__module__}.{base.__name__}" for base in type(found).__mro__}
    if "flax.linen.module.Module" in bases:
        return "from_flax"
    return "from_nnx" if any(base.startswith("flax.nnx.") for base in bases) else ""


def _hint_about(found: Any) -> str:
    """How to make a Problem of what is none."""
    if adapter := _adapter_for(found):
        return f"pegprof.{adapter}(module, loss, example) makes a Problem of a module"
    missing = _missing_parts(found)
    if len(missing) < len(_PARTS):
        return f"give it {' and '.join(missing)} as well"
    return "define a pegprof.Problem, a function that returns one, or an object with init, loss and batch"


def _call(fn: Callable[..., Any], name: str, given: Mapping[str, Any], *, where: str) -> Problem:
    """The Problem that a user's function returns, with the options that it was made with."""
    where = home_of(fn) or where
    known = options_of(fn)
    options = convert_options(given, known, where=where)
    missing = [key for key, option in known.items() if key not in options and is_required(option)]
    if missing:
        hint = " ".join(f"--set {key}=..." for key in missing)
        raise PegprofError(f"{name} needs a value for {', '.join(missing)}", where=where, hint=hint)
    with users_code(where):
        returned = fn(**options)
        problem = _as_problem(returned, name)
    if problem is None:
        what = f"{name} returned {type(returned).__name__}, not a Problem"
        raise PegprofError(what, where=where, hint=_hint_about(returned))
    defaults = {key: option.default for key, option in known.items() if option.default is not option.empty}
    return dataclasses.replace(problem, options={**defaults, **options, **problem.options})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Executed:
    """A user's file that was executed: its text then, and the module that came of it."""

    text: bytes
    module: ModuleType


_EXECUTED: dict[Path, _Executed] = {}
"""By resolved path. A file is executed once in a process, or each class in it would be several, none equal to another.
A file whose text has changed since, as in a notebook, is executed again."""


def _import_file(file: Path, name: str) -> ModuleType:
    """Runs a file with its own folder on the path, so that it finds the modules beside it."""
    if not file.is_file():
        raise PegprofError(f"there is no file {str(file)!r}")
    search_path.add_folder(str(file.parent))
    path, text = file.resolve(), file.read_bytes()
    before = _EXECUTED.pop(path, None)  # what raises is not kept
    try:
        module = before.module if before and before.text == text else _execute(path, text)
    except ImportError as error:
        if "relative import" not in str(error) or line_of(error).rpartition(":")[0] != place(str(path)):
            raise
        what = "a file on its own cannot import relatively: it belongs to no package"
        raise PegprofError(what, where=line_of(error), hint=_hint_at_module(path, name)) from error
    _EXECUTED[path] = _Executed(text=text, module=module)
    return module


def _hint_at_module(path: Path, name: str) -> str:
    """The same file as ``package.module:name``, and where that is found."""
    package = path.parent
    while (package.parent / "__init__.py").is_file():
        package = package.parent
    module = ".".join(path.with_suffix("").relative_to(package.parent).parts)
    there = "" if package.parent == Path.cwd() else f" in the folder {package.parent}"
    return f"name its module instead, {module}:{name}{there}"


def _execute(path: Path, text: bytes) -> ModuleType:
    """The module that a text makes; compiled from it, since Python's own cache takes edits by their time and size."""
    name = _module_name(path)
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None  # there is a loader
    code = loader.source_to_code(text, str(path))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(code, vars(module))
    return module


def _module_name(path: Path) -> str:
    """A name that no other file has: by the name of its module a class is found again."""
    name = f"pegprof_user_{path.stem}"  # a prefix, so that a user's optax.py does not become optax
    numbered = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
    return next(n for n in numbered if n not in sys.modules or getattr(sys.modules[n], "__file__", "") == str(path))


def _import_module(name: str) -> ModuleType:
    """Imports a module; the current folder counts, as it does for ``python -m``."""
    search_path.add_folder(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, but not what it imports
        raise PegprofError(f"there is no module {name!r}", hint="for a file, write path/file.py:name") from error


def _line_that_binds(name: str, module: ModuleType) -> str:
    """Where a module gives a name its value; its first line, if nowhere."""
    file = module.__file__ or ""
    if not file.endswith(".py"):  # a folder without __init__.py, or compiled
        return module.__name__
    for statement in ast.parse(Path(file).read_bytes()).body:
        if name in _names_bound(statement):
            return place(file, statement.lineno)
    return place(file, 1)


def _names_bound(statement: ast.stmt) -> list[str]:
    """The names that a statement gives a value, imports aside."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return [node.id for node in names if isinstance(node.ctx, ast.Store)]


def _could_be_meant(value: Any, module: ModuleType) -> bool:
    own = (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
    return own or _as_problem(value, "") is not None
