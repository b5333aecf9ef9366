"""``pegprof list``: the models that have a name."""

import sys
from typing import Annotated

from pegprof.cli.options import Debug, Quiet, export
from pegprof.cli.printing import say, show_text


def list_models(
    export_json: Annotated[str | None, export("all that is known of each model as JSON")] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """List the models that have a name: the zoo's, and those of installed packages.

    Shows each model's parameters, how many are outside embeddings, the batch size and sequence length that run takes by
    default, and whether activations or parameters dominate, by the trace of one example.
    """
    from pegprof.measure import catalog, progress
    from pegprof.report import catalog_text, output

    exports = output.choose_exports({"json": export_json})
    exports.check_writable()
    found = catalog.make_catalog(talk=progress.Lines(sys.stderr), debug=debug)
    for warning in found.warnings:
        say(f"warning: {warning}")
    show_text(
        lambda **shape: catalog_text.render_terminal(found, **shape),
        exports,
        {"json": lambda: catalog_text.render_json(found) + "\n"},
        quiet=quiet,
        widest=160,
    )
