"""Plans of an engine with Flash's layers for the bundled kernels, as lines of `dsv4_kernels.precompile`."""

from __future__ import annotations

from dsv4_kernels.compressor.api import ProjectionPlan, SavePlan, StorePlan
from dsv4_kernels.fp8.api import GemmPlan, QuantPlan, SiluMulPlan
from dsv4_kernels.front.api import InsertPlan, NormPlan
from dsv4_kernels.indexer.api import LogitsPlan, PagedLogitsPlan, QueryPlan
from dsv4_kernels.mhc.api import HeadPlan, PostPlan, PrePlan
from dsv4_kernels.mla_decode.api import DecodePlan, MergePlan
from dsv4_kernels.mla_prefill.api import ListsPlan, PrefillPlan
from dsv4_kernels.moe.api import MoePlan
from dsv4_kernels.precompile import DEVICE, line

TOKENS = 8192
DECODES = 64
SMALL = (
    line(QuantPlan, 64, 256, DEVICE),
    line(MergePlan, "mla_merge_o8", 1, 64, 8, DEVICE),
    line(DecodePlan, 2, 16, 128, 64, DEVICE, o8=True, q_heads=64),
    line(DecodePlan, 2, 16, 64, 64, DEVICE, o8=True, lookup=True),
    line(PrefillPlan, 64, 16, 128, DEVICE, own_output=False),
    line(ListsPlan, 64, 24, 4, DEVICE, own_output=False),
    line(InsertPlan, 64, 8, 16, DEVICE, own_output=False),
    line(NormPlan, 64, 128, DEVICE),
    line(MoePlan, 1, 256, 64, 16, 6, False, DEVICE),
)
"""Plans that compile in seconds."""
FLASH = (
    *(
        line(PrePlan, name, TOKENS, 4096, DEVICE, norms=[True], quantised=TOKENS)
        for name in ("mhc_pre", "mhc_pre_broadcast", "mhc_post_pre")
    ),
    line(HeadPlan, "mhc_head", TOKENS, 4096, DEVICE, norms=[True]),
    line(PostPlan, "mhc_post", TOKENS, 4096, DEVICE, norms=[True]),
    line(MoePlan, TOKENS, 4096, 2048, 256, 6, False, DEVICE, adds=True),
    *(line(QuantPlan, TOKENS, k, DEVICE) for k in (1024, 2048, 4096, 8192)),
    line(SiluMulPlan, TOKENS, 2048, DEVICE),
    line(NormPlan, TOKENS, 1024, DEVICE, quantised=True),
    *(
        line(GemmPlan, TOKENS, n, k, None, DEVICE)
        for n, k in ((1536, 4096), (32768, 1024), (4096, 8192), (4096, 4096), (4096, 2048), (8192, 1024))
    ),
    line(GemmPlan, TOKENS, 1024, 4096, 8, DEVICE, quantised=16),
    line(MergePlan, "mla_merge_o8", 1, TOKENS, 64, DEVICE),
    *(line(DecodePlan, DECODES, 64, 128, topk, DEVICE, o8=True, lookup=topk > 0) for topk in (0, 512)),
    *(line(PrefillPlan, TOKENS, 64, width, DEVICE, own_output=False) for width in (128, 640, 256)),
    *(
        line(ListsPlan, TOKENS, topk, ratio, DEVICE, window=128, own_output=False)
        for topk, ratio in ((0, 1), (512, 4), (128, 128))
    ),
    line(NormPlan, TOKENS, 1024, DEVICE),
    line(InsertPlan, TOKENS, 64, 64, DEVICE, own_output=False),
    *(line(SavePlan, "compressor_save", TOKENS, 512, ratio, DEVICE) for ratio in (4, 128)),
    *(line(StorePlan, "compressor_store", TOKENS, 512, ratio, DEVICE) for ratio in (4, 128)),
    line(StorePlan, "compressor_store_indexer", TOKENS, 128, 4, DEVICE),
    line(ProjectionPlan, DEVICE, tokens=32, hidden=4096, ratio=4, width=1024, index_width=256, heads=64),
    line(ProjectionPlan, DEVICE, tokens=32, hidden=4096, ratio=128, width=512),
    line(QueryPlan, TOKENS, 64, DEVICE),
    line(LogitsPlan, 64, DEVICE),
    line(PagedLogitsPlan, 1, 9216, 64, DEVICE),
)
"""Plans of a single rank with all heads and experts."""
