import pytest

from tests.cli.commands import Pegprof


@pytest.fixture
def pegprof_in(tmp_path):
    """Runs ``pegprof ARGUMENTS`` in a folder of its own."""
    return Pegprof(tmp_path)
