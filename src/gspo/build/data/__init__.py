"""From a config to the rows of a run."""
