"""Training over several ranks: FSDP2 and what ranks agree on."""
