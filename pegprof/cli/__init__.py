"""The command line: parse, call, print. One file a command; ``application.py`` puts them together.

Data goes to stdout, talk to stderr. Whatever is heavy to import is imported inside the command that needs it.
"""

from pegprof.cli.application import app as app
from pegprof.cli.application import main as main
