"""Checking a revision out: what is found where, what is said if it is not, and that nothing stays."""

import json
import subprocess
from pathlib import Path

import pytest

from pegprof.errors import ExitCode, PegprofError
from pegprof.measure import revisions
from pegprof.measure.process import Child
from pegprof.measure.progress import Silence
from pegprof.measure.revisions import checked_out


def git(folder, *words):
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """Two commits: net.py and a package, whose values are those of the working copy less one."""
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    (tmp_path / "src" / "helper").mkdir(parents=True)
    for value in (1, 2):
        (tmp_path / "net.py").write_text(f"VALUE = {value}\n")
        (tmp_path / "src" / "helper" / "__init__.py").write_text(f"VALUE = {value}\n")
        if value == 2:
            (tmp_path / "new.py").write_text("VALUE = 2\n")
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "--quiet", "--message", str(value))
    (tmp_path / "net.py").write_text("VALUE = 3\n")
    (tmp_path / "not_added.py").write_text("VALUE = 3\n")
    return tmp_path


def worktrees(repository):
    return git(repository, "worktree", "list", "--porcelain").count("worktree ")


def test_a_revision_is_there_for_as_long_as_it_is_needed(repository):
    with checked_out("HEAD~1", "net.py:net", folder=repository) as found:
        file, _, name = found.model.rpartition(":")
        assert (Path(file).read_text(), name) == ("VALUE = 1\n", "net")
        assert found.tree.folder == Path(file).parent
        assert found.tree.paths == (Path(file).parent, Path(file).parent / "src")
        assert found.name == f"HEAD~1 ({git(repository, 'rev-parse', '--short=7', 'HEAD~1')})"
        assert worktrees(repository) == 2
    assert worktrees(repository) == 1
    assert not Path(file).exists()
    assert (repository / "net.py").read_text() == "VALUE = 3\n"


def test_nothing_stays_after_an_interruption(repository):
    with pytest.raises(KeyboardInterrupt), checked_out("HEAD", "net.py:net", folder=repository) as found:
        raise KeyboardInterrupt
    assert not found.tree.folder.exists()
    assert worktrees(repository) == 1


def test_a_tree_that_was_removed_meanwhile_leaves_no_entry(repository):
    import shutil

    with checked_out("HEAD", "net.py:net", folder=repository) as found:
        shutil.rmtree(found.tree.folder)
    assert worktrees(repository) == 1


def test_hooks_of_the_user_do_not_run(repository):
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {repository}/hooked\n")
    hook.chmod(0o755)
    with checked_out("HEAD", "net.py:net", folder=repository):
        pass
    assert not (repository / "hooked").exists()


def test_a_package_on_the_path_is_mapped_to_the_revision(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "src"))
    with checked_out("HEAD~1", "helper:net", folder=repository) as found:
        assert found.model == "helper:net"
        assert (found.tree.paths[1] / "helper" / "__init__.py").read_text() == "VALUE = 1\n"


def test_a_user_in_a_folder_that_the_revision_lacks_works_at_its_root(repository):
    (repository / "later").mkdir()
    with checked_out("HEAD", "../net.py:net", folder=repository / "later") as found:
        assert found.tree.folder == Path(found.model.rpartition("/")[0])


@pytest.mark.parametrize(
    ("revision", "model", "words"),
    [
        ("no-such", "net.py:net", "there is no revision 'no-such'"),
        ("--help", "net.py:net", "there is no revision '--help'"),
        ("HEAD~1", "new.py:net", r"HEAD~1 has no new\.py"),
        ("HEAD", "not_added.py:net", "which git does not track"),
        ("HEAD", "json:net", "(is not in a git repository|which git does not track)"),
        ("HEAD", "no_such_package.x:net", "there is no module 'no_such_package'"),
    ],
)
def test_what_cannot_be_compared_with_is_said_with_a_hint(repository, revision, model, words):
    with pytest.raises(PegprofError, match=words) as caught, checked_out(revision, model, folder=repository):
        pass
    assert caught.value.hint
    assert caught.value.exit_code == ExitCode.USAGE
    assert worktrees(repository) == 1


def test_a_folder_without_a_repository_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "net.py").write_text("")
    with (
        pytest.raises(PegprofError, match="is not in a git repository"),
        checked_out("HEAD", "net.py:net", folder=tmp_path),
    ):
        pass


def test_without_git_that_is_said(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PegprofError, match="git cannot be run"), checked_out("HEAD", "net.py:n", folder=repository):
        pass


def test_a_child_of_a_tree_runs_its_modules_and_our_pegprof(repository, monkeypatch):
    """Even where the repository holds a pegprof of its own."""
    for package in ("pegprof", "model_zoo"):
        (repository / package).mkdir()
        (repository / package / "__init__.py").write_text("raise ImportError('the other one')\n")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "a pegprof of its own")
    with checked_out("HEAD", "net.py:net", folder=repository) as found:
        command = found.tree.command("tests.measure.where", "0")
        done = subprocess.run(
            command, cwd=found.tree.folder, capture_output=True, text=True, check=True, env={"PYTHONPATH": ROOT}
        )
    told = json.loads(done.stdout)
    assert told["pegprof"] == str(Path(revisions.__file__).parents[1] / "__init__.py")
    assert told["helper"] == str(found.tree.folder / "src" / "helper" / "__init__.py")


ROOT = str(Path(__file__).parents[2])


def test_a_real_child_works_in_the_tree(repository):
    with checked_out("HEAD~1", "net.py:net", folder=repository) as found:
        child = Child({"JAX_PLATFORMS": "cpu"}, talk=Silence(), tree=found.tree)
        try:
            child.send("GetReady", {})
            assert child.receive(limit_s=300) == {}
        finally:
            child.close()
