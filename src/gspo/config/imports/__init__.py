"""Importing: configurations of other systems, read without running them, as YAML of ours."""
