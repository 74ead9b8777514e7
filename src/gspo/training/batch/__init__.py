"""From groups to micro-batches: collation, packing, attention over packed rows."""
