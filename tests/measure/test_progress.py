"""What is said while one waits."""

import io
import threading

import pytest
from rich.console import Console

from pegprof.measure import durations
from pegprof.measure.durations import Durations
from pegprof.measure.progress import Display, Lines, Silence, Steps, listen
from pegprof.result.settings import Settings


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def take(steps, clock, *lengths_s):
    """Runs steps a, b, c ... that take so long; returns what was said to be left at the start of each."""
    left_s = []
    for text, length_s in zip("abcdefgh", lengths_s, strict=False):
        left_s.append(steps.begin(text).left_s)
        clock.now_s += length_s
    return left_s


def test_a_step_should_take_what_those_of_its_kind_took():
    clock = Clock()
    steps = Steps(now_s=clock)
    assert steps.begin("first", kind="compile").expected_s is None
    clock.now_s += 4.0
    assert steps.begin("second", kind="compile").expected_s == 4.0
    clock.now_s += 6.0
    assert steps.begin("timing", kind="other").expected_s is None
    assert steps.begin("third", kind="compile").expected_s == 5.0  # of 4 and 6
    assert steps.begin("fourth", kind="compile", expected_s=1.0).expected_s == 1.0  # whoever begins it knows better


def test_the_second_time_the_time_that_is_left_is_known():
    clock = Clock()
    first = Steps(now_s=clock)
    assert take(first, clock, 1.0, 10.0, 5.0) == [None] * 3
    second = Steps(first.durations(), now_s=clock)
    assert take(second, clock, 1.5, 20.0, 5.0) == [16.0, 15.0, 5.0]


def test_what_takes_another_time_changes_only_what_is_left_of_it():
    """A step that comes from a cache is over at once: what follows is judged by itself."""
    clock = Clock()
    first = Steps(now_s=clock)
    take(first, clock, 1.0, 100.0, 5.0)
    second = Steps(first.durations(), now_s=clock)
    assert take(second, clock, 1.0, 0.1, 5.0) == [106.0, 105.0, 5.0]


def test_a_step_that_was_not_there_before_leaves_what_was_left():
    before = Durations(total_s=60.0, starts_s=(("a", 0.0), ("b", 30.0)))
    clock = Clock()
    steps = Steps(before, now_s=clock)
    steps.begin("a")
    clock.now_s += 10.0
    assert steps.begin("unheard of").left_s == 50.0
    clock.now_s += 70.0
    assert steps.begin("unheard of").left_s == 0.0
    assert steps.begin("b").left_s == 30.0


def test_steps_of_one_text_are_told_apart_by_their_order():
    before = Durations(total_s=60.0, starts_s=(("run", 0.0), ("run", 30.0)))
    steps = Steps(before)
    assert [steps.begin("run").left_s for _ in range(2)] == [60.0, 30.0]


def test_two_threads_have_a_step_each_and_neither_ends_the_others():
    clock = Clock()
    steps = Steps(now_s=clock)
    begun, over = threading.Event(), threading.Event()

    def compile_vmap():
        steps.begin("compiling vmap", kind="compile")
        begun.set()
        over.wait()
        steps.end()

    steps.begin("compiling grad", kind="compile")
    thread = threading.Thread(target=compile_vmap)
    thread.start()
    begun.wait()
    assert steps.describe() == "compiling grad; compiling vmap"
    clock.now_s += 8.0
    steps.end()
    assert steps.describe() == "compiling vmap"
    clock.now_s += 12.0
    over.set()
    thread.join()
    assert steps.describe() == ""
    assert steps.begin("another", kind="compile").expected_s == 14.0  # 8 and 20


def test_in_a_file_each_step_is_a_line():
    file = io.StringIO()
    lines = Lines(file)
    lines.doing("compiling grad")
    lines("grad needs 1 GiB")
    lines.doing("timing", expected_s=300.0)
    assert file.getvalue().splitlines() == ["compiling grad ...", "grad needs 1 GiB", "timing, about 5 min ..."]


def test_in_a_file_the_time_that_is_left_is_told_with_each_step():
    file = io.StringIO()
    lines = Lines(file, Steps(Durations(total_s=60.0, starts_s=(("compiling", 0.0), ("timing", 20.0)))))
    lines.doing("compiling")
    lines.doing("timing", expected_s=300.0)
    assert file.getvalue().splitlines() == ["compiling, about 60 s left ...", "timing, about 40 s left ..."]


def test_on_a_terminal_there_is_one_bar_and_remarks_stay():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    display = Display(console)
    with display.progress:
        display.doing("loading")
        display.doing("timing [all] methods", expected_s=40.0)
        display("grad needs [1 GiB]")
        display.progress.refresh()
        assert len(display.progress.tasks) == 1
    text = console.file.getvalue()
    assert "timing [all] methods" in text
    assert "1 s of about 40 s" in text
    assert "grad needs [1 GiB]\n" in text


def test_on_a_terminal_the_second_time_the_bar_is_of_the_whole_command():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    display = Display(console, Steps(Durations(total_s=90.0, starts_s=(("loading", 0.0), ("timing", 20.0)))))
    with display.progress:
        display.doing("loading")
        display.progress.refresh()
        (task,) = display.progress.tasks
        assert (task.fields["start_s"], task.fields["expected_s"]) == (0.0, pytest.approx(90.0, abs=5.0))
        display.doing("timing", expected_s=3.0)
        assert task.fields["expected_s"] == pytest.approx(70.0, abs=5.0)


def test_who_wants_quiet_gets_silence(capsys):
    with listen(quiet=True) as talk:
        talk("something")
        talk.doing("something else")
        talk.done()
    assert isinstance(talk, Silence)
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_there_are_no_control_codes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with listen() as talk:
        talk.doing("something")
    assert capsys.readouterr().err == "something ...\n"


# What is remembered.


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pegprof" / "durations"


def listen_to(command):
    with listen(command=command) as talk:
        talk.doing("something")


def test_a_command_is_remembered_with_its_settings(folder, capsys):
    settings = Settings(model="mlp", batches=(4,), options={"width": 8})
    listen_to(("run", settings))
    assert capsys.readouterr().err == "something ...\n"
    listen_to(("run", Settings(model="mlp", batches=(8,))))
    assert capsys.readouterr().err == "something ...\n"
    listen_to(("run", settings))
    assert capsys.readouterr().err == "something, about 1 s left ...\n"


def test_what_was_interrupted_is_not_remembered(folder):
    def press_ctrl_c():
        with listen(command="run") as talk:
            talk.doing("something")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    assert not list(folder.glob("*"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"total_s": 1}', '{"total_s": 1, "starts_s": [["a"]]}'])
def test_a_file_that_makes_no_sense_is_as_good_as_none(folder, text):
    record = durations.find("run")
    folder.mkdir(parents=True)
    record.path.write_text(text)
    assert record.read() is None
    record.write(Durations(total_s=2.0, starts_s=(("a", 0.5),)))
    assert record.read() == Durations(total_s=2.0, starts_s=(("a", 0.5),))


def test_a_folder_that_cannot_be_written_to_does_not_matter(monkeypatch, tmp_path):
    (tmp_path / "pegprof").write_text("a file, not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    listen_to("run")


def test_the_oldest_files_make_room(folder, monkeypatch):
    monkeypatch.setattr(durations, "KEPT", 3)
    for number in range(5):
        durations.find(number).write(Durations(total_s=1.0, starts_s=()))
    assert len(list(folder.iterdir())) == 3
    assert durations.find(4).read() is not None
