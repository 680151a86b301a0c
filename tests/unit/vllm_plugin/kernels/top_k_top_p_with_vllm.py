"""Compile a share of the installed vLLM's top-k and top-p for an SM12x card, as if vLLM were a CUDA build."""

import json
from types import SimpleNamespace

import triton
import vllm.platforms as platforms
from triton.backends import backends
from vllm.platforms.interface import Platform, PlatformEnum


class Cuda(Platform):
    _enum = PlatformEnum.CUDA
    device_name = device_type = "cuda"
    dispatch_key = "CUDA"


for name, backend in backends.items():
    backend.driver.is_active = staticmethod(lambda name=name: name == "nvidia")
platforms._current_platform = Cuda()
platforms.vllm_version_matches_substr = lambda _: False

from dsv4_kernels.arch import Arch  # noqa: E402
from dsv4_runtime.vllm_plugin.kernels import sampling_ahead  # noqa: E402

compiled: list[object] = []
triton.knobs.runtime.jit_cache_hook = lambda **_: compiled.append(None)
written: list[object] = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: None if cache_hit else written.append(None)
config = SimpleNamespace(
    scheduler_config=SimpleNamespace(max_num_seqs=4),
    num_speculative_tokens=0,
    model_config=SimpleNamespace(get_vocab_size=lambda: 129280),
)
sampling_ahead.compile_share(config, Arch.SM_121, 7, 8)
print(json.dumps({"kernels": len(compiled), "calls": len(written)}))
