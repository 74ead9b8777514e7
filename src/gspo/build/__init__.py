"""From a config to the objects of a run."""
