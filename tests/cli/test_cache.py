"""The cache of what compilers answered."""

from pegprof.targets import cache


def test_the_cache_can_be_looked_at_and_cleared(pegprof_in):
    folder = pegprof_in.folder / "pegprof" / "compiled"
    folder.mkdir(parents=True)
    for name in ("a.json", "b.json", "c.draft", "somebodys.txt"):
        (folder / name).write_text("x" * 600)
    here = {"XDG_CACHE_HOME": str(pegprof_in.folder)}
    done = pegprof_in("cache", "info", **here)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"folder   {folder}\nanswers  2\nsize     1.2 KiB\n"
    done = pegprof_in("cache", "clear", **here)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"removed 2 answers, 1.2 KiB, from {folder}\n"
    assert [path.name for path in folder.iterdir()] == ["somebodys.txt"]
    assert pegprof_in("cache", "clear", "--quiet", **here).stderr == ""


def test_a_cache_that_is_not_there_is_empty(pegprof_in):
    done = pegprof_in("cache", "info", XDG_CACHE_HOME=str(pegprof_in.folder / "none"))
    assert done.returncode == 0
    assert "answers  0\nsize     0 B\n" in done.stdout


def test_the_folder_is_in_xdg_cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "pegprof" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "pegprof" / "compiled"
