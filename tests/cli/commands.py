"""The command as people and programs use it: a real process, its streams and its exit code."""

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import finish

ROOT = Path(__file__).parents[2]
MODELS = str(ROOT / "tests" / "measure" / "models.py")
FINE = f"{MODELS}:fine"
GRAD_ALONE = ["run", FINE, "--methods", "grad", "--no-time"]

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
ENVIRONMENT.pop("COLUMNS", None)  # the width of whoever runs the tests


class Pegprof:
    """Runs ``pegprof ARGUMENTS`` in a folder; keywords are variables of the environment."""

    def __init__(self, folder: Path):
        self.folder = folder

    def start(self, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environment):
        command = [sys.executable, "-m", "pegprof", *map(str, arguments)]
        env = ENVIRONMENT | environment
        return subprocess.Popen(command, cwd=self.folder, env=env, stdout=stdout, stderr=stderr, text=True)

    def __call__(self, *arguments, **environment):
        with self.start(*arguments, **environment) as process:
            stdout, stderr = finish(process)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def run_python(code: str, folder: Path):
    """Runs a program in a folder, with pegprof at hand."""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=ENVIRONMENT, stdout=-1, stderr=-1, text=True
    ) as process:
        stdout, stderr = finish(process)
    return subprocess.CompletedProcess(code, process.returncode, stdout, stderr)


def rows_of(text):
    return {row["method"]: row for row in csv.DictReader(io.StringIO(text))}


NOISY_MODEL = """\
import atexit, os
import jax.numpy as jnp

def model():
    return Noisy()

print("at import")
os.write(1, b"not by print")
atexit.register(print, "at exit")

class Noisy:
    def init(self, key):
        print("in init")
        return jnp.zeros(3)

    def loss(self, w, x):
        print("in loss")
        os.system("echo from a process of its own")
        return jnp.mean(x @ w)

    def batch(self, key, B):
        print("in batch")
        return jnp.ones((B, 3))
"""


def commit_file(path, text):
    """Makes the folder of a file a repository whose one commit is that file."""
    path.write_text(text)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "--quiet"], ["add", path.name], ["commit", "--quiet", "--message", "first"]):
        subprocess.run(["git", *author, *words], cwd=path.parent, check=True)
