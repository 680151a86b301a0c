"""The programs behind a plan's argument lists."""

from __future__ import annotations

import sys

from dsv4_runtime.contract import EnginePlan, MemberPlan


def ray_command(member: MemberPlan) -> list[str]:
    """Return the command line that keeps this member's Ray node up in the foreground."""
    return [sys.executable, "-m", "ray.scripts.scripts", *member.ray_args]


def vllm_command(engine: EnginePlan) -> list[str]:
    """Return the command line of vLLM's OpenAI server.

    The module instead of the `vllm` script: the CPU build's script fails for want of `vllm` distribution metadata.
    """
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *engine.args]
