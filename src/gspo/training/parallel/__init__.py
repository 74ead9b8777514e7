"""Training on several ranks: FSDP2, sequences over several ranks, and the division of work."""


class ShardError(ValueError):
    """The config's sharding is impossible for this model or number of ranks; the message names the key."""
