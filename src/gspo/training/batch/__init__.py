"""From groups to micro-batches: collating, packing, attention over packed rows."""
