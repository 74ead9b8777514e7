"""The native engine: generation on the trainer's own modules.

The way of a token, file by file (left: CPU; right: GPU, or `paged=True`):

    engine.py           NativeEngine: checks requests, owns the pools, loads weights
    slot_pool.py        SlotPool: waiting responses → rows of one decode batch → complete groups
    runner.py           Runner: what the pool asks of a device, implemented by
    padded_rows.py      PaddedRows (CPU)                     paged_rows.py    PagedRows (GPU)
    decoder.py          Decoder: prefill, plain decode       paged_model.py   PagedModel: packed prefill, decode
    packed_decoder.py   PackedDecoder: decode in one         graphs.py        decode steps, prefills as CUDA graphs
                        packed row, compiled if large
    cache_attention.py  the model's attention calls the cache: CACHES[number].attend, on both sides
    padded_cache.py     SlotCache [slots, heads, length]     pages.py         PagedKV, PageAllocator
    shared_prompts.py   rows with one prompt are read once   (full pages of a prompt are shared)
    kernels/cpu_attention.py  decode_attend (C++)            kernels/triton_decode.py  attention and the draw
    decode_attention.py the same in plain torch, with masks
    slots.py            Slots: token, length, log-prob of every row, on the device, in both cases

A model whose logits would differ runs without PackedDecoder (bfloat16, eager attention) or without pages: transformers'
own forward over SlotCache, with `decode_attention.grouped_attention` where it runs sdpa. Attention reaches its cache by
a number in the global table CACHES, because a compiled layer must not see an object that changes (cache_attention.py).
"""
