"""Sizes that decide how much memory a step takes. Without torch, so that `gspo plan` can read them."""

# Logits of one chunk of the output head: at most this many float32 numbers (64 MiB).
CHUNK_ELEMENTS = 1 << 24
# The same for the fused head of a GPU in half precision (512 MiB).
FUSED_CHUNK_ELEMENTS = 1 << 27
# Logits of all chunks that are kept for the backward rather than computed again (256 MiB).
KEEP_ELEMENTS = 1 << 26
# Tokens per page of the KV cache.
PAGE = 16
