"""The facts of the zoo's models on record, ``model_zoo/facts.json``: tracing a billion parameters takes seconds.

A record counts for the very files that it was made with; if they change, the models are traced. Other versions of jax
or flax may keep a little more or less of an example, which ``other_versions`` says. A change of a model's size shows in
a diff of the record. ``python -m pegprof.measure.recorded_facts`` writes it anew.
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
    """The facts by model; none, where they are of other files."""
    record = _load()
    facts: dict[str, Any] = record["models"] if record.get("files") == _digest() else {}
    return facts


def other_versions() -> str:
    """With which versions the facts were made, in words, if those here are others."""
    made_with, here = _load().get("versions", {}), _versions()
    return " and ".join(f"{name} {version}" for name, version in made_with.items() if version != here[name])


def write(facts: dict[str, Any]) -> None:
    record = {"files": _digest(), "versions": _versions(), "models": facts}
    path().write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _load() -> dict[str, Any]:
    return json.loads(path().read_text(encoding="utf-8")) if path().is_file() else {}


def _digest() -> str:
    files = [*sorted(_zoo_folder().glob("*.py")), *(Path(__file__).parents[1] / name for name in _TRACERS)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "flax")}


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
