"""`python -m polybus` is the `polybus` command."""

from polybus.cli.main import main

if __name__ == "__main__":
    main()
