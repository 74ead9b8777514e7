"""Ray: placement, actors and fault handling."""
