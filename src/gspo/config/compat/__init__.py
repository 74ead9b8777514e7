"""Other systems' names and values, and what they mean here."""
