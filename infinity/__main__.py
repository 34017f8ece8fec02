"""``python -m infinity``: the command line."""

from infinity.cli import main

if __name__ == "__main__":
    main()
