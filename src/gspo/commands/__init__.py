"""The subcommands of `gspo`, a module each. `gspo.cli` finds them by name and imports only the one that is run."""
