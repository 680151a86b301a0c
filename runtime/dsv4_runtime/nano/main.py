"""Command `dsv4-nano DIR`, which creates the nano checkpoint."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dsv4_runtime.nano.checkpoint import NotANanoCheckpointError, damaged, make
from dsv4_runtime.nano.recipe import Drafts, Precision

DAMAGED = "damaged: "
"""Prefix of the line of each file that differs from the manifest."""


def main(argv: Sequence[str] | None = None) -> int:
    """Create the checkpoint described by `argv` (default: the process's arguments); return the exit status."""
    parser = argparse.ArgumentParser(
        prog="dsv4-nano", description="Make a tiny, real DeepSeek-V4 checkpoint with random weights."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the checkpoint goes")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default: 0)")
    parser.add_argument(
        "--precision",
        type=Precision,
        choices=list(Precision),
        default=Precision.BF16,
        help="bf16 for CPU, fp8 for the released FP8 and MXFP4 formats (default: bf16)",
    )
    parser.add_argument(
        "--drafts",
        type=Drafts,
        choices=list(Drafts),
        default=Drafts.NONE,
        help="layers for speculative decoding: an MTP layer, or DSpark's stages (default: none)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read every file, and make the checkpoint anew if one is damaged"
    )
    arguments = parser.parse_args(argv)
    try:
        wrong = damaged(arguments.directory) if arguments.verify else []
        for name in wrong:
            print(f"{DAMAGED}{name}")
        made = make(
            arguments.directory,
            seed=arguments.seed,
            precision=arguments.precision,
            drafts=arguments.drafts,
            anew=bool(wrong),
        )
        print(made)
    except (NotANanoCheckpointError, ValueError, OSError) as error:
        print(f"dsv4-nano: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
