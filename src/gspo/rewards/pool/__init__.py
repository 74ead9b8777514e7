"""Worker processes that run reward functions under a deadline."""
