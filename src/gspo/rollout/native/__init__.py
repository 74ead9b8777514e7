"""The native engine: generation on the trainer's own modules."""
