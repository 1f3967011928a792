"""`python -m argosy` is `argosy`."""

from argosy.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
