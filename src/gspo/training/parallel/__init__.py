"""Training on several ranks: FSDP2 and the division of work."""
