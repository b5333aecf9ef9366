"""Tests of the measuring, and what those that stop a process share."""

import signal


def heed_ctrl_c() -> None:
    """For a child, before it starts: one whose parents run in the background would ignore Ctrl-C, as they do."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
