"""Finding a Problem by name, and what a user is told when there is none."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

from pegprof.errors import ExitCode, PegprofError
from pegprof.models.problem import Problem, load_problem, zoo_names
from tests import packages
from tests.waiting import LIMIT_S

MODEL = """
    import jax.numpy as jnp
    from flax import linen as nn
    from flax import nnx
    from pegprof import Problem

    linear = Problem(
        name="linear",
        init=lambda key: jnp.zeros(3),
        loss=lambda w, x: jnp.mean(x @ w),
        batch=lambda key, B: jnp.ones((B, 3)),
    )

    def sized(width: int = 3, scale=1.0, bias=False, kind="plain", depth: int | None = None):
        return Problem(name=f"sized-{width}", init=linear.init, loss=linear.loss, batch=linear.batch)

    def needs(width: int):
        return sized(width)

    def wrong():
        return 3

    def fails():
        return jnp.zeros(3) @ jnp.zeros(4)

    number = 3

    class Linear:
        description = "by parts"

        def __init__(self, width: int = 3):
            self.options = {"inputs": width}

        def init(self, key):
            return jnp.zeros(self.options["inputs"])

        def loss(self, w, x):
            return jnp.mean(x @ w)

        def batch(self, key, B):
            return jnp.ones((B, self.options["inputs"]))

    parts = Linear(5)

    class Half:
        init = loss = staticmethod(lambda *args: 0.0)

    half = Half()
    dense = nn.Dense(3)
    nnx_dense = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
"""


@pytest.fixture
def model_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "my_model.py"
    file.write_text(textwrap.dedent(MODEL))
    return file


def line_of(file, text: str) -> int:
    return next(n for n, line in enumerate(file.read_text().splitlines(), 1) if text in line)


def run_python(code: str, **environment: str) -> None:
    root = Path(__file__).parents[2]
    env = {**os.environ, **environment}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S, cwd=root, env=env)


# What is found.


def test_zoo_names_come_without_jax():
    code = (
        "import sys; from pegprof.models.problem import zoo_names; assert zoo_names(); assert 'jax' not in sys.modules"
    )
    run_python(code)


def test_every_zoo_name_loads_under_its_own_name():
    assert [load_problem(name).name for name in zoo_names()] == zoo_names()


def test_no_two_zoo_models_share_a_name():
    assert len(set(zoo_names())) == len(zoo_names())


def test_the_abstract_values_of_a_large_model_need_no_device():
    code = """
        from pegprof.models.problem import load_problem
        problem = load_problem("transformer-151m")
        assert problem.abstract_params()["embed"]["embedding"].shape == (32100, 1024)
        assert problem.abstract_batch(64).shape == (64, 513)
    """
    run_python(textwrap.dedent(code), JAX_PLATFORMS="no_such_platform")


def test_abstract_values_are_those_of_the_real_ones():
    problem = load_problem("mlp", {"width": 8})
    abstract = problem.abstract_params(), problem.abstract_batch(2)
    real = problem.init(jax.random.key(0)), problem.batch(jax.random.key(0), 2)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), real) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract
    )


def test_a_problem_is_loaded_from_a_file(model_file):
    problem = load_problem(f"{model_file}:linear")
    assert problem.name == "linear"
    assert problem.keep_batch_dim
    assert problem.abstract_batch(4).shape == (4, 3)


def test_a_file_imports_its_neighbours(model_file):
    (model_file.parent / "neighbour_of_mine.py").write_text("from my_model import linear as found\n")
    second = model_file.parent / "second.py"
    second.write_text("from neighbour_of_mine import found\n")
    assert load_problem(f"{second}:found").name == "linear"


def test_a_problem_is_loaded_from_a_module_of_the_current_folder(model_file, monkeypatch):
    package = model_file.parent / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    model_file.rename(package / "models.py")
    monkeypatch.chdir(model_file.parent)
    assert load_problem("package_of_mine.models:linear").name == "linear"


def test_a_function_is_called_with_the_options(model_file):
    given = {"width": "5", "scale": "2", "bias": "True", "kind": "3", "depth": "7"}
    problem = load_problem(f"{model_file}:sized", given)
    assert problem.name == "sized-5"
    assert problem.options == {"width": 5, "scale": 2.0, "bias": True, "kind": "3", "depth": 7}
    assert [type(value) for value in problem.options.values()] == [int, float, bool, str, int]


def test_annotations_that_are_text_say_the_type_too(tmp_path):
    file = tmp_path / "future.py"
    file.write_text(f"from __future__ import annotations\n{textwrap.dedent(MODEL)}")
    assert load_problem(f"{file}:needs", {"width": "5"}).name == "sized-5"


def test_an_object_with_the_parts_of_a_problem_is_one(model_file):
    problem = load_problem(f"{model_file}:parts")
    assert (problem.name, problem.description, problem.options) == ("parts", "by parts", {"inputs": 5})
    assert problem.keep_batch_dim
    assert problem.abstract_batch(4).shape == (4, 5)


def test_the_class_of_such_an_object_is_called_with_the_options(model_file):
    problem = load_problem(f"{model_file}:Linear", {"width": "7"})
    assert (problem.name, problem.options) == ("Linear", {"inputs": 7, "width": 7})
    assert problem.abstract_params().shape == (7,)


def test_the_options_in_effect_include_the_defaults(model_file):
    assert load_problem(f"{model_file}:sized").options["width"] == 3
    assert load_problem("transformer-tiny", {"seq_len": "32"}).options["seq_len"] == 32
    assert load_problem("transformer-tiny").options["seq_len"] == 128


def test_what_a_users_file_prints_goes_to_stderr(tmp_path, capsys):
    file = tmp_path / "talks.py"
    file.write_text("print('hello')\n" + textwrap.dedent(MODEL))
    load_problem(f"{file}:linear")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")


# A file is executed once.

BLOCK = """
    import typing
    import jax.numpy as jnp
    from pegprof import Problem

    class Block(typing.NamedTuple):
        w: typing.Any

    made = Problem(
        name="{name}",
        init=lambda key: Block(jnp.zeros(3)),
        loss=lambda block, x: jnp.mean(x @ block.w),
        batch=lambda key, B: jnp.ones((B, 3)),
    )
"""


def write_block(file: Path, name: str) -> Path:
    file.write_text(textwrap.dedent(BLOCK).format(name=name))
    return file


def class_of_params(problem: Problem) -> type:
    return type(problem.abstract_params())


def test_a_file_is_executed_once_so_that_its_classes_stay_the_same(model_file, monkeypatch):
    write_block(model_file, "first")
    monkeypatch.chdir(model_file.parent)
    specs = [f"{model_file}:made", "my_model.py:made", f"./{model_file.parent.name}/../my_model.py:made"]
    (model_file.parent / model_file.parent.name).mkdir()
    assert len({class_of_params(load_problem(spec)) for spec in specs}) == 1


def test_a_file_that_was_edited_is_executed_again(model_file):
    before = load_problem(f"{write_block(model_file, 'first')}:made")
    times = model_file.stat()
    write_block(model_file, "other")  # as long as before
    os.utime(model_file, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = load_problem(f"{model_file}:made")
    assert (before.name, after.name) == ("first", "other")
    assert class_of_params(before) is not class_of_params(after)


def test_a_file_that_raised_is_executed_again(model_file):
    marker = model_file.with_name("ready")
    text = f"from pathlib import Path\nPath({str(marker)!r}).read_text()\n{textwrap.dedent(MODEL)}"
    model_file.write_text(text)
    for _ in range(2):
        assert_refused(f"{model_file}:linear", {}, "my_model.py:2: FileNotFoundError")
    marker.touch()
    assert load_problem(f"{model_file}:linear").name == "linear"


def test_an_edit_that_does_not_run_is_an_error_and_not_what_was_there_before(model_file):
    spec = f"{write_block(model_file, 'first')}:made"
    load_problem(spec)
    model_file.write_text("made = (\n")
    assert_refused(spec, {}, "my_model.py:1: syntax error: '(' was never closed")
    write_block(model_file, "first")
    assert load_problem(spec).name == "first"


def test_two_files_of_the_same_name_are_two_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    problems = []
    for folder in ("a", "b", "a"):
        (tmp_path / folder).mkdir(exist_ok=True)
        problems.append(load_problem(f"{write_block(tmp_path / folder / 'same_name.py', folder)}:made"))
    assert [problem.name for problem in problems] == ["a", "b", "a"]
    first, other, again = map(class_of_params, problems)
    assert first is again is not other
    for made in (first, other):  # as pickle finds it
        assert sys.modules[made.__module__].Block is made


# What other packages offer.


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs packages that offer models: ``install(package={"name": "module:attribute"})``."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def install(**offers):
        for package, models in offers.items():
            packages.install(tmp_path, package, textwrap.dedent(MODEL), models)

    return install


def test_a_model_that_a_package_offers_is_found_by_its_name(install):
    install(acme={"acme-linear": "acme:linear", "acme-sized": "acme:sized"})
    assert load_problem("acme-linear").name == "linear"
    assert load_problem("acme-sized", {"width": "5"}).name == "sized-5"


def test_a_model_of_the_zoo_is_not_hidden_by_one_of_a_package(install):
    install(acme={"mlp": "acme:linear"})
    assert load_problem("mlp").name == "mlp"


def test_a_name_that_two_packages_offer_is_refused_with_the_ways_out(install):
    install(acme={"net": "acme:linear"}, bcme={"net": "bcme:sized"})
    assert_refused("net", {}, "acme and bcme both offer a model 'net'\nhint: write acme:linear or bcme:sized")


def test_a_mistyped_name_is_compared_with_what_packages_offer(install):
    install(acme={"acme-linear": "acme:linear"})
    assert_refused("acme-liner", {}, "there is no model 'acme-liner'\nhint: did you mean 'acme-linear'?")


# What is not.


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("transformer-tny", {}, "there is no model 'transformer-tny'\nhint: did you mean 'transformer-tiny'?"),
        ("quux", {}, "there is no model 'quux'\nhint: known: cnn, "),
        ("mlp", {"widht": "3"}, "mlp: unknown option 'widht'\nhint: did you mean 'width'?"),
        ("mlp", {"colour": "3"}, "mlp: unknown option 'colour'\nhint: known: inputs, width, layers, classes, dtype"),
        ("mlp", {"width": "wide"}, "mlp: option width=wide is not of type int\nhint: like 1024"),
        ("mlp", {"width": 1.5}, "mlp: option width=1.5 is not of type int"),
        ("mlp", {"dtype": "decimal"}, "mlp: option dtype cannot be 'decimal'\nhint: known: float32, "),
        ("transformer-tiny", {"remat": "maybe"}, "option remat=maybe is not of type bool\nhint: true or false"),
        (
            "transformer-tiny",
            {"heads": "5"},
            "width 64 does not divide into 5 heads\nhint: set heads to a divisor of 64",
        ),
        ("my_model.py", {}, "there is no file 'my_model.py'"),
        ("no_such_file.py:linear", {}, "there is no file 'no_such_file.py'"),
        ("no_such.module:linear", {}, "there is no module 'no_such.module'\nhint: for a file, write path/file.py:name"),
    ],
)
def test_a_wrong_spec_or_option_is_told_with_a_hint(spec, options, message):
    assert_refused(spec, options, message)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("liner", {}, "my_model.py:1: there is no 'liner' here\nhint: did you mean 'linear'?"),
        (
            "number",
            {},
            "my_model.py:{number = 3}: number is of type int: neither a Problem nor a function\nhint: define",
        ),
        ("linear", {"width": "3"}, "my_model.py:{linear = Problem(}: linear is not a function: it takes no options\n"),
        ("parts", {"width": "3"}, "my_model.py:{parts = }: parts is not a function: it takes no options"),
        ("half", {}, "my_model.py:{half = }: half is of type Half: neither a Problem nor a function\nhint: give it "),
        ("Half", {}, "my_model.py:{class Half}: Half returned Half, not a Problem\nhint: give it batch as well"),
        ("dense", {}, "\nhint: pegprof.from_flax(module, loss, example) makes a Problem of a module"),
        ("nnx_dense", {}, "\nhint: pegprof.from_nnx(module, loss, example) makes a Problem of a module"),
        ("Linear", {"width": "wide"}, "my_model.py:{def __init__}: option width=wide is not of type int\nhint: like 3"),
        ("sized", {"widht": "3"}, "my_model.py:{def sized}: unknown option 'widht'\nhint: did you mean 'width'?"),
        ("needs", {}, "my_model.py:{def needs}: needs needs a value for width\nhint: --set width=..."),
        ("needs", {"width": "wide"}, "my_model.py:{def needs}: option width=wide is not of type int"),
        ("wrong", {}, "my_model.py:{def wrong}: wrong returned int, not a Problem"),
        ("fails", {}, "my_model.py:{@ jnp.zeros(4)}: TypeError: "),
    ],
)
def test_a_wrong_name_in_a_users_file_is_told_with_file_and_line(model_file, name, options, message):
    if "{" in message:
        before, rest = message.split("{")
        text, after = rest.split("}")
        message = f"{before}{line_of(model_file, text)}{after}"
    assert_refused(f"{model_file}:{name}", options, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import jax\nx = (\n", "broken.py:2: syntax error: '(' was never closed"),
        ("import jax\n\nx = 1 / 0\n", "broken.py:3: ZeroDivisionError: division by zero"),
        ("import no_such_package\n", "broken.py:1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("import sys\nsys.exit(3)\n", "broken.py:2: SystemExit: 3"),
    ],
)
def test_a_broken_file_is_told_with_its_line(tmp_path, text, message):
    file = tmp_path / "broken.py"
    file.write_text(text)
    assert_refused(f"{file}:linear", {}, message)


def test_a_broken_module_is_told_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("\n\nx = 1 / 0\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert_refused("broken_module:linear", {}, "broken_module.py:3: ZeroDivisionError")


def test_a_package_that_lacks_what_it_imports_is_told_with_its_line(tmp_path, monkeypatch):
    package = tmp_path / "package_that_lacks"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nimport no_such_package\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    message = "package_that_lacks/__init__.py:2: ModuleNotFoundError: No module named 'no_such_package'"
    assert_refused("package_that_lacks.models:linear", {}, message)


def test_float64_is_refused_where_jax_would_compute_in_float32():
    problem = load_problem("mlp", {"dtype": "float64"})
    with pytest.raises(PegprofError, match="JAX_ENABLE_X64=1"):
        problem.abstract_params()


def assert_refused(spec: str, options: dict, message: str) -> None:
    with pytest.raises(PegprofError) as refusal:
        load_problem(spec, options)
    assert message in str(refusal.value)
    assert refusal.value.exit_code == ExitCode.USAGE


def test_a_problem_is_immutable_and_takes_keywords_only():
    problem = load_problem("mlp")
    with pytest.raises(AttributeError):
        problem.name = "other"
    with pytest.raises(TypeError):
        Problem("name", problem.init, problem.loss, problem.batch)
