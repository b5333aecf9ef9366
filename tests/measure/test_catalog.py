"""The catalogue of models: what is on record is what the traces say, and no model spoils it for the others."""

import dataclasses
import importlib.metadata
import json
import textwrap

import jax.numpy as jnp
import pytest

from pegprof.measure import catalog, recorded_facts
from pegprof.measure.progress import Silence
from pegprof.measure.worker import model_facts
from pegprof.models.problem import Problem, load_problem, zoo_names
from pegprof.report import catalog_text
from tests import packages

MODELS = """
    import os, signal
    import jax.numpy as jnp
    from pegprof import Problem

    print("a plugin may print")

    def make(loss=lambda w, x: jnp.mean(x @ w)):
        return Problem(
            name="linear",
            init=lambda key: jnp.zeros(3),
            loss=loss,
            batch=lambda key, B: jnp.ones((B, 3)),
            description="three numbers",
        )

    fine = make()
    dies = make(loss=lambda w, x: os.kill(os.getpid(), signal.SIGKILL))
    raises = make(loss=lambda w, x: 1 / 0)
"""


def facts_of(problem: Problem) -> dict:
    return model_facts.describe(problem)


# What is shown.


@pytest.mark.parametrize("width", [120, 80, 60, 40, 10])
def test_no_terminal_is_so_narrow_that_a_name_could_not_be_typed(width):
    long = "a-package-s-model-with-quite-a-name"
    entry = {"package": "p", "description": "words " * 20, "seq_len": None, "options": {}} | dict.fromkeys(
        ("parameters", "parameters_outside_embeddings", "parameter_bytes", "activation_bytes_per_example"), 10**8
    )
    entries = [catalog.Entry(name=name, activations_dominate=True, **entry) for name in ("transformer-151m", long)]
    lines = catalog_text.render_terminal(catalog.Catalog(entries=tuple(entries), warnings=()), width=width).splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("t", "a"))] == ["transformer-151m", long]
    assert max(map(len, lines)) <= max(width, len(long))
    assert ("words" in "".join(lines)) == (width == 120)


# What is counted.


def test_the_parameters_of_transformer_151m_outside_embeddings_are_the_papers_and_the_norms():
    facts = facts_of(load_problem("transformer-151m"))
    assert facts["parameters_outside_embeddings"] == 150_994_944 + 25 * 1024
    assert facts["parameters"] == 150_994_944 + (25 + 32100 + 512) * 1024


@pytest.mark.parametrize(
    ("name", "is_embedding"),
    [
        ("embed/embedding", True),
        ("positions", True),
        ("encoder/pos_embedding", True),
        ("pos", True),
        ("block_0/relative_position_bias", True),
        ("patch_embed/kernel", False),
        ("block_0/attention/key/kernel", False),
        ("composition", False),
        ("table", True),
    ],
)
def test_an_embedding_is_looked_up_or_says_so_by_its_own_name(name, is_embedding):
    params = {name: jnp.zeros((5, 2))}
    problem = Problem(
        name="lookup",
        init=lambda key: params,
        loss=lambda params, t: jnp.mean(params[name][t] if name == "table" else params[name] * jnp.sum(t)),
        batch=lambda key, B: jnp.zeros(B, int),
    )
    assert facts_of(problem)["parameters_outside_embeddings"] == (0 if is_embedding else 10)


def test_activations_dominate_by_the_traces_count():
    facts = facts_of(load_problem("transformer-tiny"))
    assert facts["activation_bytes_per_example"] >= facts["parameter_bytes"]
    assert facts["activations_dominate"]
    assert not facts_of(load_problem("transformer-tiny", {"seq_len": "2"}))["activations_dominate"]


def test_options_that_json_does_not_know_are_text():
    problem = dataclasses.replace(load_problem("mlp"), options={"dtype": jnp.dtype("float32"), "width": 3})
    assert facts_of(problem)["options"] == {"dtype": "float32", "width": 3}


@pytest.mark.slow
def test_the_form_with_a_loop_over_layers_has_the_sizes_of_the_plain_form():
    quick = {name: form for name in zoo_names() if (form := model_facts._quick_form(name))}
    assert "transformer-151m" in quick
    for name, form in quick.items():
        plain = load_problem(name)
        assert model_facts.describe(plain, traced=form) == model_facts.describe(plain), name


# What is on record.


@pytest.mark.slow
def test_what_is_on_record_is_what_the_traces_say():
    if versions := recorded_facts.other_versions():
        pytest.skip(f"the record was made with {versions}: other versions may keep more or less of an example")
    facts, failures = catalog.survey_models(zoo_names(), talk=Silence())
    assert not failures
    assert recorded_facts.read() == facts, "write it anew: python -m pegprof.measure.recorded_facts"


def test_with_other_versions_of_jax_nothing_is_traced_and_that_is_said(monkeypatch):
    monkeypatch.setattr(
        recorded_facts, "_versions", lambda: {"jax": "0.99", "flax": importlib.metadata.version("flax")}
    )
    monkeypatch.setattr(catalog, "survey_models", lambda names, **_: ({}, dict.fromkeys(names, "traced")))
    found = catalog.make_catalog(talk=Silence())
    assert {entry.name for entry in found.entries} == set(zoo_names())
    (warning,) = found.warnings
    assert "were counted with jax" in warning


def test_a_record_of_other_files_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_facts, "path", lambda: tmp_path / "facts.json")
    assert recorded_facts.read() == {}
    recorded_facts.write({"mlp": {"parameters": 3}})
    assert recorded_facts.read() == {"mlp": {"parameters": 3}}
    monkeypatch.setattr(recorded_facts, "_TRACERS", (*recorded_facts._TRACERS, "errors.py"))
    assert recorded_facts.read() == {}


# What goes wrong.


@pytest.fixture
def install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def install(models, package="acme"):
        packages.install(tmp_path, package, textwrap.dedent(MODELS), models)

    return install


def test_a_model_of_a_package_is_listed_with_its_package(install, monkeypatch):
    monkeypatch.setattr(catalog, "zoo_names", list)
    install({"acme-fine": "acme:fine"})
    found = catalog.make_catalog(talk=Silence())
    (entry,) = found.entries
    assert (entry.name, entry.package, entry.parameters, entry.batch) == ("acme-fine", "acme", 3, 64)
    assert found.warnings == ()
    assert "three numbers (acme)" in catalog_text.render_terminal(found)


def test_models_that_are_broken_are_warnings_and_cost_no_other(install, monkeypatch, tmp_path):
    monkeypatch.setattr(catalog, "zoo_names", list)
    install({"dies": "acme:dies", "fine": "acme:fine", "gone": "acme:gone", "raises": "acme:raises"})
    install({"net": "acme:fine"}, package="bcme")
    install({"net": "acme:fine"}, package="ccme")
    found = catalog.make_catalog(talk=Silence())
    line = next(i for i, line in enumerate((tmp_path / "acme.py").read_text().splitlines(), 1) if "raises" in line)
    assert [entry.name for entry in found.entries] == ["fine"]
    assert sorted(found.warnings) == [
        "dies of acme cannot be used: killed by SIGKILL, as the system does when memory runs out",
        "gone of acme cannot be used: acme.py:1: there is no 'gone' here\nhint: known: make, fine, dies, raises",
        "net of bcme cannot be used: bcme and ccme both offer a model 'net'\nhint: write acme:fine or acme:fine",
        f"raises of acme cannot be used: acme.py:{line}: ZeroDivisionError: division by zero",
    ]


def test_a_model_that_a_package_calls_like_one_of_the_zoo_is_a_warning(install, monkeypatch):
    monkeypatch.setattr(catalog, "zoo_names", lambda: ["mlp"])
    install({"mlp": "acme:fine"})
    found = catalog.make_catalog(talk=Silence())
    assert [(entry.name, entry.package) for entry in found.entries] == [("mlp", "pegprof")]
    assert found.warnings == ("acme offers a model 'mlp' too: that name is the zoo's; write acme:fine",)


# What is shown.

ENTRY = catalog.Entry(
    name="transformer-151m",
    package="pegprof",
    description="[bold]decoder-only[/] transformer, 12 layers, D=1024, T=512",
    parameters=184_415_232,
    parameters_outside_embeddings=151_020_544,
    seq_len=512,
    parameter_bytes=4 * 184_415_232,
    activation_bytes_per_example=10**9,
    activations_dominate=True,
    options={"layers": 12},
)
SMALL = dataclasses.replace(
    ENTRY,
    name="net",
    package="acme",
    description="",
    parameters=3,
    parameters_outside_embeddings=3,
    seq_len=None,
    activations_dominate=False,
)
CATALOG = catalog.Catalog(entries=(ENTRY, SMALL), warnings=())

TABLE = """\
                                 outside
model             parameters  embeddings  batch  seq_len  dominant     description
────────────────────────────────────────────────────────────────────────────────────────────────────
transformer-151m     184.4 M     151.0 M     64      512  activations  [bold]decoder-only[/]
                                                                       transformer, 12 layers,
                                                                       D=1024, T=512
net                        3           3     64        –  parameters   (acme)"""


def test_the_table_fits_100_columns_and_is_plain_text_in_a_pipe():
    assert catalog_text.render_terminal(CATALOG) == TABLE


def test_the_json_has_every_field():
    first, second = json.loads(catalog_text.render_json(CATALOG))
    assert first == dataclasses.asdict(ENTRY)
    assert second["seq_len"] is None
