"""How good is the model: evaluation on held-out prompts."""
