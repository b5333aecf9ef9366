"""``pegprof.profile``: the command's options, by the same names."""

import inspect

import pytest

import pegprof
from pegprof.cli.run import run
from pegprof.measure import session
from pegprof.result.settings import Settings

ELSEWHERE = {"model": "problem", "option": "options", "quiet": "progress"}
OF_THE_COMMAND = {"seq_len", "dtype", "export_csv", "export_json", "export_markdown", "no_csv", "debug"}


def settings_of(monkeypatch, **arguments):
    monkeypatch.setattr(session, "measure", lambda settings, **_: settings)
    return pegprof.profile("mlp", **arguments)


def test_every_option_of_run_has_its_name_here():
    options = {name.removeprefix("no_") for name in inspect.signature(run).parameters if name not in OF_THE_COMMAND}
    names = {name for name in inspect.signature(pegprof.profile).parameters if name != "others"}
    assert names == {ELSEWHERE.get(name, name) for name in options}


def test_it_asks_for_what_the_command_asks_for_by_default(monkeypatch):
    assert settings_of(monkeypatch) == Settings(model="mlp")


def test_what_the_command_takes_as_text_is_taken_as_text_or_as_values(monkeypatch):
    text = {"methods": "grad,vmap", "stats": "norm", "target": "cpu,h100", "mesh": "data=4,fsdp=2"}
    text |= {"time_limit": "2m", "memory_limit": "20G"}
    values = {"methods": ("grad", "vmap"), "stats": ["norm"], "target": ("cpu", "h100"), "mesh": {"data": 4, "fsdp": 2}}
    values |= {"time_limit": 120, "memory_limit": 20 * 2**30}
    assert settings_of(monkeypatch, **text) == settings_of(monkeypatch, **values)


def test_fields_of_settings_are_taken_by_their_own_names_too(monkeypatch):
    old = settings_of(monkeypatch, time_limit_s=40.0, targets=("h100",), memory_limit_bytes=2**30)
    assert old == settings_of(monkeypatch, time_limit=40, target="h100", memory_limit="1G")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("time_limt", "did you mean 'time_limit'?"),
        ("no_time", "in Python it is time=False"),
        ("set", "in Python it is options={...}"),
        ("export_csv", r"in Python it is profile\(...\).to_frame\(\).to_csv\(...\)"),
    ],
)
def test_an_argument_that_does_not_exist_is_told_the_nearest(name, words):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; {words}") as caught:
        pegprof.profile("mlp", **{name: 40})
    assert "known: others" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"methods": ("grd",)}, "unknown method 'grd'\nhint: did you mean 'grad'?"),
        ({"stats": "men"}, "unknown statistic 'men'\nhint: did you mean 'mean'?"),
        ({"problem": "mpl"}, "there is no model 'mpl'\nhint: did you mean 'mlp'?"),
        ({"methods": ()}, "no method is named"),
        ({"time_limit": "soon"}, "'soon' is not a duration"),
    ],
)
def test_a_wrong_name_is_told_before_anything_is_loaded(monkeypatch, arguments, words):
    monkeypatch.setattr(session, "measure", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(pegprof.PegprofError) as caught:
        pegprof.profile(**{"problem": "mlp", **arguments})
    assert str(caught.value).startswith(words)
