"""``python -m pegprof``."""

from pegprof import search_path

if __name__ == "__main__":
    search_path.move_first_folder()  # before anything else is imported

    from pegprof.cli import main

    main()
