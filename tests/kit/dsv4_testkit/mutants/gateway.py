"""Mutants of the gateway."""

from __future__ import annotations

from dsv4_testkit.mutants.common import Mutant

GATEWAY = (
    Mutant(
        "a stream with stop strings is continued",
        "runtime/dsv4_runtime/gateway/continuation.py",
        '"stop_token_ids", "ignore_eos"',
        '"stop", "stop_token_ids", "ignore_eos"',
        ("tests/unit/gateway/test_continuation.py",),
    ),
    Mutant(
        "usage counts the last engine's tokens alone",
        "runtime/dsv4_runtime/gateway/continuation.py",
        'self._base + usage["completion_tokens"]',
        'usage["completion_tokens"]',
        ("tests/unit/gateway/test_continuation.py",),
    ),
    Mutant(
        "a finished stream lacks the usage that its engine owed",
        "runtime/dsv4_runtime/gateway/continuation.py",
        'if options.get("include_usage") and not self._usage_given:',
        "if False:",
        ("tests/unit/gateway/test_continuation.py",),
    ),
    Mutant(
        "usage is given twice",
        "runtime/dsv4_runtime/gateway/continuation.py",
        'if options.get("include_usage") and not self._usage_given:',
        'if options.get("include_usage"):',
        ("tests/unit/gateway/test_continuation.py",),
    ),
    Mutant(
        "a continued stream has as many tokens again",
        "runtime/dsv4_runtime/gateway/continuation.py",
        "left = context if limit is None else limit - tokens",
        "left = context if limit is None else limit",
        ("tests/unit/gateway/test_continuation.py",),
    ),
    Mutant(
        "a stream is continued by another model",
        "runtime/dsv4_runtime/gateway/proxy.py",
        "if exchange.begun and exchange.model != life.model:",
        "if False:",
        ("tests/unit/gateway/test_groups.py",),
    ),
    Mutant(
        "what may have taken effect is sent again",
        "runtime/dsv4_runtime/gateway/proxy.py",
        "elif exchange.sent_upstream and not _repeatable(exchange):",
        "elif False:",
        ("tests/unit/gateway/test_proxy.py",),
    ),
    Mutant(
        "retries have no budget",
        "runtime/dsv4_runtime/gateway/proxy.py",
        "if self._retries >= max(_MIN_RETRIES, _RETRY_SHARE * self.active):",
        "if False:",
        ("tests/unit/gateway/test_suspects.py",),
    ),
    Mutant(
        "a request that kills engines is sent for ever",
        "runtime/dsv4_runtime/gateway/suspects.py",
        "if exchange.deaths <= SUSPECTED_DEATHS:",
        "if True:",
        ("tests/unit/gateway/test_suspects.py", "tests/unit/gateway/test_proxy.py"),
    ),
    Mutant(
        "suspected requests are tried together",
        "runtime/dsv4_runtime/gateway/suspects.py",
        "        await self._turn.acquire()\n",
        "        self._turn = asyncio.Lock()\n        await self._turn.acquire()\n",
        ("tests/unit/gateway/test_suspects.py",),
    ),
    Mutant(
        "a planned end makes requests suspected",
        "runtime/dsv4_runtime/gateway/proxy.py",
        "if died and not life.planned:",
        "if died:",
        ("tests/unit/gateway/test_suspects.py",),
    ),
    Mutant(
        "a key that was taken out of the file is still admitted",
        "runtime/dsv4_runtime/gateway/keys.py",
        "self._digests, self._stamp = self._read(), stamp",
        "self._stamp = stamp",
        ("tests/unit/gateway/test_clients.py",),
    ),
    Mutant(
        "a client's own header opens vLLM's port",
        "runtime/dsv4_runtime/gateway/exchange.py",
        "    token_auth.HEADER.lower().encode(),\n",
        "",
        ("tests/unit/gateway/test_wire.py",),
    ),
    Mutant(
        "a client's key goes to vLLM",
        "runtime/dsv4_runtime/gateway/exchange.py",
        "dropped = _NOT_UPSTREAM if keep_key else _NOT_UPSTREAM | _KEYS",
        "dropped = _NOT_UPSTREAM",
        ("tests/unit/gateway/test_wire.py", "tests/unit/gateway/test_clients.py"),
    ),
    Mutant(
        "the queue of pipelined requests has no end",
        "runtime/dsv4_runtime/gateway/connection.py",
        "            if len(self._queue) >= _MAX_QUEUED:\n",
        "            if False:\n",
        ("tests/unit/gateway/test_bounds.py",),
    ),
    Mutant(
        "requests that wait are not bounded",
        "runtime/dsv4_runtime/gateway/hold.py",
        "if not admitted and (",
        "if False and (",
        ("tests/unit/gateway/test_proxy.py",),
    ),
)
