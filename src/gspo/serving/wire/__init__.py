"""The forms in which answers go out: chat completions, completions, tokens."""
