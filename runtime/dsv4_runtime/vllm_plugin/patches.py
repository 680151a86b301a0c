"""The register of all changes that dsv4 makes to vLLM and to torch below it, and the page that lists them.

`python -m dsv4_runtime.vllm_plugin.patches > docs/reference/patches.md` writes the page.
"""

from collections.abc import Iterable

from dsv4_runtime.vllm_plugin import (
    patch_block_tables,
    patch_block_zeroing,
    patch_collective_ledger,
    patch_compressed_slots,
    patch_cpu_drafts,
    patch_cpu_linear,
    patch_cpu_operators,
    patch_cpu_tile_scheduler,
    patch_faults,
    patch_forked_engine,
    patch_header_cache,
    patch_model_inspection,
    patch_patient_queue,
    patch_window_indices,
)
from dsv4_runtime.vllm_plugin.patch import Patch

PATCHES: tuple[Patch, ...] = (
    patch_cpu_operators.PATCH,
    patch_cpu_linear.PATCH,
    patch_cpu_tile_scheduler.PATCH,
    patch_cpu_drafts.MTP,
    patch_cpu_drafts.DSPARK,
    patch_block_zeroing.PATCH,
    patch_window_indices.PATCH,
    patch_block_tables.PATCH,
    patch_compressed_slots.PATCH,
    patch_patient_queue.PATCH,
    patch_header_cache.PATCH,
    patch_collective_ledger.PATCH,
    patch_model_inspection.PATCH,
    patch_forked_engine.PATCH,
    patch_faults.PATCH,
)

_HEAD = """# Patches to vLLM and torch

Generated from `runtime/dsv4_runtime/vllm_plugin/patches.py`; to change it, change the register and run
`python -m dsv4_runtime.vllm_plugin.patches > docs/reference/patches.md`.

dsv4 changes them through the entry point `vllm.general_plugins`, in each process that imports the module named, right
after the import. A patch checks the symbol first. If the module already does what the patch does, nothing is changed
and a log line says that the patch can be deleted; if the symbol is another one than the patch knows, the process ends
with `PatchRefusedError`. On a machine with GPUs three are applied: the count of collective operations
(`GroupCoordinator`), the inspection of a model's class, and the question whether CUDA is in use; the others concern the
CPU build of vLLM, or the tests of faults.
"""


def page(patches: Iterable[Patch] = PATCHES) -> str:
    """Return the reference page in Markdown, one section per patch."""
    sections = [
        f"## `{patch.symbol}`\n\n"
        "| | |\n|---|---|\n"
        f"| module | `{patch.module}` |\n"
        f"| why | {patch.why} |\n"
        f"| upstream | {patch.upstream} |\n"
        f"| read in | {patch.versions} |\n"
        f"| delete when | {patch.obsolete_when} |\n"
        for patch in patches
    ]
    return "\n".join((_HEAD, *sections))


if __name__ == "__main__":
    print(page(), end="")
