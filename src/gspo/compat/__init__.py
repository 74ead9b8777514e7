"""verl's trainer classes."""
