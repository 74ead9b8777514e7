"""Loading: from files, flags and overrides to one checked config."""
