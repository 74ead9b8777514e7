"""`python -m gspo`: the same as the `gspo` command."""

from gspo.cli import main

main()
