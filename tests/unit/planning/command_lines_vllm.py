"""Check command lines with the parser, argument classes and executors of the vLLM that Python imports.

Reads `[{"args": [...], "env": {...}}, …]` from stdin; writes one text for each, empty if vLLM accepts it.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.executor import Executor


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(message)


def problem(args: list[str], env: dict[str, str]) -> str:
    """Return vLLM's error for one command line; empty if there is none."""
    kept = dict(os.environ)
    os.environ |= env
    try:
        parsed = make_arg_parser(_Parser()).parse_args(args)
        validate_parsed_serve_args(parsed)
        engine = AsyncEngineArgs.from_cli_args(parsed)
        backend = engine.distributed_executor_backend or "uni"
        # From VllmConfig.__post_init__, which needs the model's configuration and an accelerator.
        parallel = SimpleNamespace(distributed_executor_backend=backend)
        executor = Executor.get_class(SimpleNamespace(parallel_config=parallel))  # type: ignore[arg-type]
        if engine.async_scheduling and not executor.supports_async_scheduling():
            return f"`{backend}` does not support async scheduling yet."
    except (Exception, SystemExit) as error:  # vLLM would not start after any error
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ |= kept
    return ""


if __name__ == "__main__":
    json.dump([problem(**line) for line in json.load(sys.stdin)], sys.stdout)
