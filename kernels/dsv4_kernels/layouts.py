"""Layouts of the packed caches, as data that reference, kernels and tests share."""

from __future__ import annotations

import functools
from dataclasses import dataclass

LARGEST_SCALE = 134
"""The largest UE8M0 byte (2^7) of a group that mla_decode dequantises exactly, for values up to 57,344."""


@dataclass(frozen=True)
class PackedCache:
    """A page of `tokens` tokens: first every token's data row, then every token's scale row, then padding.

    `nope` E4M3 codes and `rope` bf16 values make a data row, one UE8M0 byte per `group` codes plus `scale_padding` zero
    bytes a scale row. `align` is what the page's length is rounded up to. A page may sit in a larger block: addresses
    take the stride between pages from the tensor, not from here.
    """

    tokens: int
    nope: int = 448
    rope: int = 64
    group: int = 64
    scale_padding: int = 1
    align: int = 576

    @property
    def width(self) -> int:
        """Values of one token."""
        return self.nope + self.rope

    @property
    def data_row(self) -> int:
        """Bytes of one token's data."""
        return self.nope + 2 * self.rope

    @property
    def groups(self) -> int:
        """Scale bytes in use per token."""
        return self.nope // self.group

    @property
    def scale_row(self) -> int:
        """Bytes of one token's scales."""
        return self.groups + self.scale_padding

    @property
    def page_bytes(self) -> int:
        """Bytes of one page with its padding."""
        used = self.tokens * (self.data_row + self.scale_row)
        return -(-used // self.align) * self.align


@functools.cache
def ds_mla(tokens: int) -> PackedCache:
    """DeepSeek-V4's `fp8_ds_mla` page of `tokens` tokens (584 bytes each); 64 for the window and ratio 4, 2 for ratio
    128.
    """
    return PackedCache(tokens)
