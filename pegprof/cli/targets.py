"""``pegprof targets``: the devices that ``--target`` knows."""

import sys

from pegprof.cli.options import Quiet, Tracebacks
from pegprof.cli.printing import shape_of


def show_targets(quiet: Quiet = False, debug: Tracebacks = False) -> None:
    """List the devices that --target knows.

    Shows the memory that a program can have on each, and whether its compiler is installed or how to install it.
    """
    from pegprof.measure import progress, workers
    from pegprof.report import target_list

    with progress.listen(quiet=quiet) as talk:
        listed = target_list.list_targets(workers.find_host(talk))
    print(target_list.render(listed, **shape_of(sys.stdout)))
