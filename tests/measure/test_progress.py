"""What is said while one waits."""

import io

from rich.console import Console

from pegprof.measure.progress import Display, Lines, Silence, StepClock, listen


def test_a_step_should_take_what_those_of_its_kind_took():
    times = iter([0.0, 10.0, 14.0, 20.0, 21.0])
    clock = StepClock(now_s=lambda: next(times))
    assert clock.begin("compile") is None  # begins at 10
    assert clock.begin("compile") == 4.0  # the first took from 10 to 14
    assert clock.begin("other") is None
    assert clock.begin("compile") == 5.0  # 4 and 6


def test_in_a_file_each_step_is_a_line():
    file = io.StringIO()
    lines = Lines(file)
    lines.doing("compiling grad")
    lines("grad needs 1 GiB")
    lines.doing("timing", expected_s=300.0)
    assert file.getvalue().splitlines() == ["compiling grad ...", "grad needs 1 GiB", "timing, about 5 min ..."]


def test_on_a_terminal_the_step_moves_and_remarks_stay():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    display = Display(console)
    with display.progress:
        display.doing("timing [all] methods", expected_s=40.0)
        display("grad needs [1 GiB]")
        display.progress.refresh()
    text = console.file.getvalue()
    assert "timing [all] methods" in text
    assert "1 s of about 40 s" in text
    assert "grad needs [1 GiB]\n" in text


def test_who_wants_quiet_gets_silence(capsys):
    with listen(quiet=True) as talk:
        talk("something")
        talk.doing("something else")
    assert isinstance(talk, Silence)
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_there_are_no_control_codes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with listen() as talk:
        talk.doing("something")
    assert capsys.readouterr().err == "something ...\n"
