"""GSPO: post-train language models on verifiable rewards. Importing this is cheap; torch loads on first use."""

__version__ = "0.1.0"
