"""Says where modules come from, for ``test_revisions.py``."""

import importlib.util
import json
import sys

found = {name: importlib.util.find_spec(name) for name in ("pegprof", "helper")}
sys.stdout.write(json.dumps({name: spec and spec.origin for name, spec in found.items()}))
