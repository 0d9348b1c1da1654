"""`python -m cheri_export` is `cheri-export`."""

from cheri_export.cli import main

if __name__ == "__main__":
    main()
