"""Rules that refuse or warn: contradictions, and settings without effect."""
