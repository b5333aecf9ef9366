"""A revision of the user's code, checked out beside it for as long as it is measured.

A git worktree in a temporary folder: what is not committed there is not in it. Children that run its code work in the
same folder of it as the user does here, and find its packages before those of the current tree.
"""

import contextlib
import dataclasses
import importlib.machinery
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pegprof.errors import PegprofError
from pegprof.measure.process import Tree
from pegprof.models import own_models
from pegprof.models.problem import zoo_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Revision:
    """A revision that is checked out.

    Args:
      name: what the user called it, and the commit that it stands for.
      model: the model as children have to name it there.
      tree: the code.
    """

    name: str
    model: str
    tree: Tree


@contextlib.contextmanager
def checked_out(revision: str, model: str, *, folder: Path) -> Iterator[Revision]:
    """Checks a revision out, and removes it again in the end.

    Args:
      revision: as git names it: a branch, a tag, a commit, ``HEAD~1``.
      model: what will be measured; it has to be in the repository, and in the revision.
      folder: where the user is.

    Raises:
      PegprofError: there is no repository, no such revision, or no such model in it.
    """
    source = _find_source(model, folder)
    root = _find_root(source if source.is_dir() else source.parent)
    commit = _find_commit(root, revision)
    inside = source.relative_to(root)
    if not _git(root, "ls-files", "--", str(inside)):
        hint = "--against is for models whose code is in a repository: both revisions would run the same"
        raise PegprofError(f"{model} is in {source}, which git does not track", where="--against", hint=hint)
    if _git(root, "cat-file", "-e", f"{commit}:{inside.as_posix()}") is None:
        hint = f"name a revision that has it: git log --oneline -- {inside}"
        raise PegprofError(f"{revision} has no {inside}", where=f"--against {revision}", hint=hint)
    with tempfile.TemporaryDirectory(prefix="pegprof-", ignore_cleanup_errors=True) as temporary:
        place = Path(temporary).resolve() / "tree"
        try:
            # Hooks of the user's, as after a checkout, are for the user's own tree.
            if _git(root, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", str(place), commit) is None:
                raise PegprofError(
                    f"{revision} cannot be checked out", hint=f"git worktree add FOLDER {revision} says why"
                )
            yield Revision(
                name=revision if commit.startswith(revision) else f"{revision} ({commit[:7]})",
                model=_name_in_tree(model, place / inside),
                tree=_find_tree(root, place, folder),
            )
        finally:
            if _git(root, "worktree", "remove", "--force", str(place)) is None:
                shutil.rmtree(place, ignore_errors=True)
                _git(root, "worktree", "prune")


def _find_source(model: str, folder: Path) -> Path:
    """The file of a model, or the package that it is in."""
    source = model.rpartition(":")[0]
    if source.endswith(".py"):
        return (folder / source).resolve()
    package = _package_of(model).partition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(package, [str(folder), *sys.path])
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    place = next((each for each in places if each), None)
    if place is None:
        raise PegprofError(f"there is no module {package!r}", hint="for a file, write path/file.py:name")
    return Path(place).resolve()


def _package_of(model: str) -> str:
    source = model.rpartition(":")[0]
    if source:
        return source
    offers = own_models.offered().get(model, [])
    return offers[0].module if offers and model not in zoo_names() else "model_zoo"


def _find_root(folder: Path) -> Path:
    found = _git(folder, "rev-parse", "--show-toplevel")
    if found is None:
        hint = "--against compares a model of a git repository with a revision of that"
        raise PegprofError(f"{folder} is not in a git repository", where="--against", hint=hint)
    return Path(found).resolve()


def _find_commit(root: Path, revision: str) -> str:
    found = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if not found:
        hint = "git branch --all and git log --oneline list them; a shallow clone has few: git fetch --unshallow"
        raise PegprofError(f"there is no revision {revision!r} in {root}", where="--against", hint=hint)
    return found


def _name_in_tree(model: str, source: Path) -> str:
    """A file goes by where it is; a package is found on the path."""
    place, _, name = model.rpartition(":")
    return f"{source}:{name}" if place.endswith(".py") else model


def _find_tree(root: Path, place: Path, folder: Path) -> Tree:
    """The folder that the user is in, and where Python looks for modules, as far as these are in the repository."""
    here = [_map(Path(entry), root, place) for entry in [str(folder), *sys.path] if entry]
    paths = [path for path in [*here, place / "src", place] if path and path.is_dir()]
    at = _map(folder, root, place)
    return Tree(folder=at if at and at.is_dir() else place, paths=tuple(dict.fromkeys(paths)))


def _map(path: Path, root: Path, place: Path) -> Path | None:
    """The same path in the other tree; None if it is not in this one."""
    path = path.resolve()
    return place / path.relative_to(root) if path.is_relative_to(root) else None


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    except OSError as error:
        raise PegprofError(f"git cannot be run: {error.strerror}", where="--against", hint="install git") from error
    return done.stdout.strip() if done.returncode == 0 else None
