"""A clock for races."""

import pytest

from pegprof.measure import rounds
from tests.measure.races import Clock


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(rounds, "time", made)
    return made
