"""Run the `polybus` command by `python -m polybus`."""

from polybus.cli.main import main

if __name__ == "__main__":
    main()
