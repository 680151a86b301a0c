"""Write to and read from the packed `fp8_ds_mla` cache of DeepSeek-V4 (`numerics.ds_mla`).

A token is 512 values: 448 are stored as E4M3 with one UE8M0 byte per 64, the last 64 (the rotated ones) as bf16.

`mla_cache_write`: kv bf16 [T', 512] and slots int64 [T], T ≤ T', into cache uint8 [pages, bytes]; slot = page · page
tokens + offset, a negative slot is skipped. Per group of 64: byte = 127 + ceil(log2(max(amax, 1e-4)/448)), code =
e4m3(x · 2^(127 − byte)). The eighth scale byte is written as 0. Bytes of rows that no slot names stay as they are; two
equal slots are the caller's error.
`mla_cache_read`: slots int64 [N] → bf16 [N, 512], x = e4m3 · 2^(byte − 127), exact in bf16; a negative slot gives
zeros.

Offsets are 64-bit, since page · stride passes 2^31 from some 57 thousand pages on. The page stride is the tensor's, a
multiple of 16; page sizes need not be powers of two. T = 0 and N = 0 launch nothing.
Tolerance: bitwise, both ways. Source: the layout of vLLM's cache_utils and FlashMLA's tests/quant.py, restated in
numerics.PackedCache.
"""
