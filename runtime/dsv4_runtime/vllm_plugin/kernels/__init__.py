"""The bundled kernels inside vLLM: hooks per operation, selected by `DSV4_KERNELS`.

| operation | request of vLLM | bundled |
|---|---|---|
| `moe` | the MXFP4 experts of a layer | `dsv4_kernels.moe`, W4A16 (`bundled`) or W4A8 (`bundled_w4a8`) |
| `fp8_linear` | products with FP8 weights in blocks of 128 x 128 | `dsv4_kernels.fp8` |
| `mla_decode` | sparse attention of decode tokens over the packed cache | `dsv4_kernels.mla_decode` |
| `mhc` | hyper-connections, before, between and after the sublayers | `dsv4_kernels.mhc` |
| `compressor` | compressed keys and values, and the indexer's keys | `dsv4_kernels.compressor` |
| `indexer` | queries and scores of the indexer | `dsv4_kernels.indexer` |
| `o_proj` | inverse RoPE, quantization and the grouped wo_a product | `dsv4_kernels.mla_decode`, `fp8` |

`choice` selects the provider of each operation. The adapter of the installed vLLM (`v032`, `v033`) lists hooks and
symbols; `hooks` attaches the bundled kernels when vLLM imports the modules, `warmup` compiles all variants before vLLM
captures graphs. An operation is bundled only if all of its hooks match their symbols; otherwise vLLM's own kernels are
used, and one warning names the symbol.
"""
