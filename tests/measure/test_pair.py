"""Two revisions in one run: what they have in common is the same program, to the last byte."""

import collections
import tempfile

from pegprof.measure.pair import measure_pair
from pegprof.measure.progress import Silence
from pegprof.measure.revisions import checked_out
from pegprof.result.settings import Settings
from tests.measure.test_revisions import git

MODEL = """
import jax.numpy as jnp
from pegprof import Problem

linear = Problem(
    name="linear",
    init=lambda key: jnp.ones(3),
    loss=lambda w, x: jnp.mean((x @ w) ** 2),
    batch=lambda key, B: jnp.ones((B, 3)),
)
"""


def test_a_program_that_both_revisions_have_is_compiled_once_for_both(tmp_path, monkeypatch):
    repository, folder = tmp_path / "repository", tmp_path / "temporary"
    repository.mkdir()
    folder.mkdir()
    (repository / "linear.py").write_text(MODEL)
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "one"]):
        git(repository, *words)
    monkeypatch.chdir(repository)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    compiled = []

    def enough(before, after, batch):
        compiled.extend(path.relative_to(folder).parts for path in folder.glob("*/jit_*-cache"))
        return True

    settings = Settings(model="linear.py:linear", batches=(4,), methods=("grad", "surgery"), runs=1, processes=2)
    with checked_out("HEAD", settings.model, folder=repository) as revision:
        results = measure_pair(revision, settings, lambda *_: None, enough, talk=Silence())
    assert [row.status for result in results for row in result.rows] == ["ok"] * 4
    assert len({where for where, _ in compiled}) == 1, "one folder, for both"
    programs = collections.Counter(name.partition("-")[0] for _, name in compiled)
    assert programs["jit_value"] == programs["jit_fn"] == 1, "grad's and surgery's"
    assert not list(folder.iterdir()), "nothing is left"
