"""No test can hang: one that does fails, says where it was, and does not keep the others from running."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

HANGING = """
import threading, time

def test_hangs():
    threading.Thread(target=time.sleep, args=(600,), daemon=True, name="a second thread").start()
    time.sleep(600)

def test_hangs_and_then_hangs_in_its_cleaning_up():
    try:
        time.sleep(600)
    finally:
        forever()

def forever():
    threading.Event().wait()

def test_fine():
    pass
"""


def test_who_waits_in_vain_can_say_so_before_the_test_is_ended():
    settings = tomllib.loads(PYPROJECT.read_text())["tool"]["pytest"]["ini_options"]
    assert LIMIT_S < settings["timeout"] < settings["faulthandler_timeout"]


@pytest.mark.slow
def test_a_test_that_hangs_fails_with_the_stacks_of_all_threads_and_the_session_ends(tmp_path):
    (tmp_path / "test_hanging.py").write_text(HANGING)
    limits = ["--timeout=3", "--override-ini=faulthandler_timeout=15"]
    command = [sys.executable, "-m", "pytest", "-n", "2", "-c", PYPROJECT, "--rootdir", tmp_path, *limits, tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1, done.stdout
    assert "2 failed, 1 passed" in done.stdout
    assert "Failed: Timeout (>3.0s) from pytest-timeout." in done.stdout
    assert "Stack of a second thread" in done.stdout
    assert re.search(r"crashed while running '.*::test_hangs_and_then_hangs_in_its_cleaning_up'", done.stdout)
    assert "in forever" in done.stderr  # of faulthandler
