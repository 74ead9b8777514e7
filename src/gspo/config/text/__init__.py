"""The configuration as text: what `gspo config` and `--dry-run` print."""
