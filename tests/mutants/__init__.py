"""Mutants: small wrong edits of the source, each of which the fast tests named beside it must notice.

`rooms/<room>.toml` lists them. A mutant has a `name` (the bug in words), a `file` below `src/gspo`, a snippet to `find`
that occurs exactly once, its `replace`, and the `tests` (folders, files or `file::test` below `tests/`) that must fail;
`tests` at the top of a file is the default of its room. `survives` is the reason why a mutant may live. `make mutants`
runs them.
"""
