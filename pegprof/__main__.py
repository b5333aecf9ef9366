"""``python -m pegprof``."""

from pegprof.cli import main

if __name__ == "__main__":
    main()
