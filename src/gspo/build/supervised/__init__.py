"""Runs on answers: examples to imitate (`gspo sft`) and preference pairs (`gspo rm`)."""
