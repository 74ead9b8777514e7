"""The Ray backend: placement, actors and fault handling."""
