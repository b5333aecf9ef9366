"""The facts of the zoo's models on record, ``model_zoo/facts.json``: tracing a billion parameters takes seconds.

A record counts only for the very files and versions that it was made with; for any others the models are traced. It is
also where a change of a model's size shows in a diff. ``python -m pegprof.measure.recorded_facts`` writes it anew.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

_TRACERS = ("measure/worker/residuals.py", "measure/worker/model_facts.py")  # these files decide what the facts are


def path() -> Path:
    return _zoo_folder() / "facts.json"


def read() -> dict[str, Any]:
    """The facts by model; none, where they are of other files or versions."""
    if not path().is_file():
        return {}
    record = json.loads(path().read_text(encoding="utf-8"))
    facts: dict[str, Any] = record["models"] if record["made_with"] == _made_with() else {}
    return facts


def write(facts: dict[str, Any]) -> None:
    record = {"made_with": _made_with(), "models": facts}
    path().write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _made_with() -> dict[str, str]:
    files = [*sorted(_zoo_folder().glob("*.py")), *(Path(__file__).parents[1] / name for name in _TRACERS)]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return {"files": digest, **{name: importlib.metadata.version(name) for name in ("jax", "flax")}}


def _zoo_folder() -> Path:
    package = importlib.util.find_spec("model_zoo")
    assert package is not None  # installed with pegprof
    assert package.origin is not None
    return Path(package.origin).parent


def main() -> None:
    from pegprof.measure.catalog import survey_models
    from pegprof.measure.progress import Silence
    from pegprof.models.problem import zoo_names

    facts, failures = survey_models(zoo_names(), talk=Silence())
    if failures:
        raise SystemExit("\n".join(f"{name}: {why}" for name, why in failures.items()))
    write({name: facts[name] for name in zoo_names()})


if __name__ == "__main__":
    main()
