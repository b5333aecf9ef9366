"""Records in, text out: for terminals, Markdown, CSV, JSON, JUnit and GitHub.

``formats.py`` is the table of formats, ``output.py`` writes them to files, ``tables.py`` makes tables that fit a
width. Nothing here measures.
"""
