"""Other systems' trainer classes."""
