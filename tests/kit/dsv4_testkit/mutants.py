"""The mutants of `tests/mutants.py`: name, file, a text that is in it exactly once, its replacement, and the tests."""

from __future__ import annotations

from dataclasses import dataclass

_OPERATOR = "operator/dsv4_operator"
_DECIDE = "runtime/dsv4_runtime/agent/decide"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change that a test must notice."""

    name: str
    file: str
    text: str
    """In the file exactly once."""
    replacement: str
    tests: tuple[str, ...]
    """Arguments of pytest."""


MUTANTS = (
    Mutant(
        "an EngineCore that gave up for want of memory is what the kernel ended",
        f"{_DECIDE}/recovery.py",
        "if ended and is_consequence_of_oom(own):",
        "if False:",
        ("tests/unit/agent/test_faults.py",),
    ),
    Mutant(
        "a wrong answer is the engine's fault before the files are read",
        f"{_DECIDE}/head.py",
        "if engine.wrong is not None and (None not in said or",
        "if engine.wrong is not None and (True or",
        ("tests/unit/agent/test_weights_doubted.py",),
    ),
    Mutant(
        "an answer is kept before every member has read its files",
        f"{_DECIDE}/head.py",
        "engine.served and all(said):",
        "engine.served and state.verified:",
        ("tests/unit/agent/test_weights_doubted.py",),
    ),
    Mutant(
        "what was read in an earlier engine's life counts",
        f"{_DECIDE}/member.py",
        "(event.task is Task.VERIFY or state.phase is Phase.SERVING)",
        "True",
        ("tests/unit/agent/test_weights_doubted.py",),
    ),
    Mutant(
        "an answer from wrong weights is as good as before",
        "runtime/dsv4_runtime/engine/completion.py",
        "if abs(now.margins[place] - margin) > 2 * tolerance:",
        "if False:",
        ("tests/unit/agent/test_completion.py",),
    ),
    Mutant(
        "a decision on a status that was not saved",
        f"{_OPERATOR}/controller/reconcile.py",
        "        except Exception:\n            self._kept = saved\n            raise\n",
        "        except Exception:\n            raise\n",
        ("tests/unit/controller/test_reconcile.py", "tests/unit/controller/test_reconcile_ends.py"),
    ),
    Mutant(
        "an error of the save is hidden",
        f"{_OPERATOR}/controller/reconcile.py",
        "        except Exception:\n            self._kept = saved\n            raise\n",
        "        except Exception:\n            return\n",
        ("tests/unit/controller/test_reconcile.py", "tests/unit/controller/test_reconcile_ends.py"),
    ),
    Mutant(
        "a full disk is no reason to stop",
        f"{_OPERATOR}/controller/reconcile.py",
        "            if not deleting:\n                self._kept = saved\n                raise\n",
        "",
        ("tests/unit/controller/test_reconcile.py", "tests/unit/controller/test_reconcile_ends.py"),
    ),
    Mutant(
        "members end while their evidence is collected",
        f"{_OPERATOR}/controller/reconcile.py",
        "        if not done:\n            return False, status\n",
        "        if not done:\n            return True, status\n",
        ("tests/unit/controller/test_reconcile.py", "tests/unit/controller/test_reconcile_ends.py"),
    ),
    Mutant(
        "what follows a fence does not wait for it",
        f"{_OPERATOR}/controller/reconcile.py",
        "                        if not await self._backend.fence(deployment, key.group, incarnation):\n"
        "                            return _Executed(status, waits=True)\n",
        "                        await self._backend.fence(deployment, key.group, incarnation)\n",
        ("tests/unit/controller/test_reconcile.py", "tests/unit/controller/test_reconcile_ends.py"),
    ),
    Mutant(
        "a deletion is over before its last fence",
        f"{_OPERATOR}/lifecycle/decide.py",
        'ending, ending.model_copy(update={"phase": target}))',
        'ending.model_copy(update={"phase": target}))',
        ("tests/unit/controller/test_reconcile.py", "tests/unit/controller/test_reconcile_ends.py"),
    ),
    Mutant(
        "the holder of a lease acts after its deadline",
        f"{_OPERATOR}/controller/lease.py",
        "return self._renewed is not None and self._clock() - self._renewed < DEADLINE_SECONDS",
        "return self._renewed is not None",
        ("tests/unit/controller/test_lease.py",),
    ),
    Mutant(
        "the lease of a live holder is taken at once",
        f"{_OPERATOR}/controller/lease.py",
        'return now - self._seen[1] > float(spec.get("leaseDurationSeconds") or LEASE_SECONDS)',
        "return True",
        ("tests/unit/controller/test_lease.py",),
    ),
    Mutant(
        "a renewal counts from its answer",
        f"{_OPERATOR}/controller/lease.py",
        "        self._renewed = begun\n        return True\n",
        "        self._renewed = self._clock()\n        return True\n",
        ("tests/unit/controller/test_lease.py",),
    ),
    Mutant(
        "a lease that another took is kept",
        f"{_OPERATOR}/controller/lease.py",
        'if found is None or (found.get("spec") or {}).get("holderIdentity") != self.identity:',
        "if found is None:",
        ("tests/unit/controller/test_lease.py",),
    ),
    Mutant(
        "the guard of writes is off",
        f"{_OPERATOR}/kube/client.py",
        'guard = self._guard if method != "GET" and self._guard is not None else _allow',
        "guard = _allow",
        ("tests/unit/kube/test_guard.py",),
    ),
    Mutant(
        "a write is not checked when it is sent",
        f"{_OPERATOR}/kube/client.py",
        "        self._guard()\n        await super().write_with_length(writer, content_length)\n",
        "        await super().write_with_length(writer, content_length)\n",
        ("tests/unit/kube/test_guard.py",),
    ),
    Mutant(
        "a pod is deleted whatever its uid",
        f"{_OPERATOR}/backends/pods/fencing.py",
        'PODS, metadata["namespace"], metadata["name"], uid=metadata["uid"], grace_seconds=grace_seconds',
        'PODS, metadata["namespace"], metadata["name"], grace_seconds=grace_seconds',
        ("tests/unit/pods/test_fencing.py",),
    ),
    Mutant(
        "pods of a lost node are removed without waiting nodeLoss.after",
        f"{_OPERATOR}/backends/pods/fencing.py",
        "is not None and lost >= policy.after:",
        "is not None:",
        ("tests/unit/pods/test_fencing.py",),
    ),
    Mutant(
        "pods are removed by force whatever their node says",
        f"{_OPERATOR}/backends/pods/fencing.py",
        "        elif (lost := await self._lost_for(pod, policy)) is not None and lost >= policy.after:\n",
        "        else:\n",
        ("tests/unit/pods/test_fencing.py",),
    ),
    Mutant(
        "nodeLoss.policy Wait replaces",
        f"{_OPERATOR}/backends/pods/fencing.py",
        "if policy.policy is not NodeLossPolicy.REPLACE or name is None:",
        "if name is None:",
        ("tests/unit/pods/test_fencing.py",),
    ),
    Mutant(
        "a deposed operator forms an older incarnation",
        f"{_OPERATOR}/backends/pods/services.py",
        "    if latest > incarnation:\n",
        "    if False:\n",
        ("tests/unit/pods/test_superseded.py",),
    ),
    Mutant(
        "the head moves whoever moved it meanwhile",
        f"{_OPERATOR}/backends/pods/services.py",
        '    await kube.apply({**wanted, "metadata": about})\n',
        "    await kube.apply(wanted)\n",
        ("tests/unit/pods/test_superseded.py",),
    ),
    Mutant(
        "an owned object that was removed is not made again",
        f"{_OPERATOR}/backends/pods/services.py",
        "        return not settling or bool(_names(known.versions) - _names(versions))\n",
        "        return False\n",
        ("tests/unit/pods/test_repair.py",),
    ),
    Mutant(
        "a Secret is made again with another token",
        f"{_OPERATOR}/backends/pods/token.py",
        "        key = earlier or new_key()\n",
        "        key = new_key()\n",
        ("tests/unit/pods/test_repair.py",),
    ),
    Mutant(
        "whoever was refused beside another request gives up",
        "runtime/dsv4_runtime/client.py",
        "credential.answer(key, shown, answer.headers)",
        "credential.answer(key, credential.headers, answer.headers)",
        ("tests/unit/backends/test_drain.py",),
    ),
    Mutant(
        "vLLM's end in good order hides that its EngineCore was killed",
        f"{_DECIDE}/death.py",
        "isinstance(told[0], ShuttingDown) and not any(_all(signs, CoreLost))",
        "isinstance(told[0], ShuttingDown)",
        ("tests/unit/agent/test_faults.py",),
    ),
    Mutant(
        "a suspended group is suspended before its fence is over",
        f"{_OPERATOR}/lifecycle/decide.py",
        'ending, ending.model_copy(update={"phase": target}))',
        'ending.model_copy(update={"phase": target}))',
        ("tests/unit/lifecycle/test_two_deciders.py",),
    ),
    Mutant(
        "a number is formed before its claim was kept",
        f"{_OPERATOR}/lifecycle/decide.py",
        "        return Decision(actions, self.now, claimed)\n",
        "        return Decision((*actions, Form(plan, self.deployment)), self.now, claimed)\n",
        ("tests/unit/lifecycle/test_decide.py",),
    ),
    Mutant(
        "members are formed without fencing those before",
        f"{_OPERATOR}/lifecycle/decide.py",
        "return Decision((*others, *self._fence_unproven(group), form), self.now + LOOK_SECONDS, group)",
        "return Decision((*others, form), self.now + LOOK_SECONDS, group)",
        ("tests/unit/lifecycle/test_decide.py",),
    ),
    Mutant(
        "members are formed, then those before are fenced",
        f"{_OPERATOR}/lifecycle/decide.py",
        "return Decision((*others, *self._fence_unproven(group), form), self.now + LOOK_SECONDS, group)",
        "return Decision((form, *others, *self._fence_unproven(group)), self.now + LOOK_SECONDS, group)",
        ("tests/unit/lifecycle/test_decide.py",),
    ),
    Mutant(
        "a single missing member is made again",
        f"{_OPERATOR}/lifecycle/decide.py",
        "        if {member.rank for member in group.members} - present:\n",
        "        if False:\n",
        ("tests/unit/lifecycle",),
    ),
    Mutant(
        "an agent of another incarnation is heard by the operator",
        f"{_OPERATOR}/backends/pods/agents.py",
        "if status.incarnation != self.incarnation or (known is not None and known.heard > heard):",
        "if known is not None and known.heard > heard:",
        ("tests/unit/pods/test_agents.py",),
    ),
    Mutant(
        "an older report replaces a later one",
        f"{_OPERATOR}/backends/pods/agents.py",
        "if status.incarnation != self.incarnation or (known is not None and known.heard > heard):",
        "if status.incarnation != self.incarnation:",
        ("tests/unit/pods/test_agents.py",),
    ),
    Mutant(
        "an agent is believed about another member",
        f"{_OPERATOR}/lifecycle/watch.py",
        "    return status if said == (key.deployment, key.group, member.incarnation, member.rank) else None\n",
        "    return status\n",
        ("tests/unit/lifecycle",),
    ),
    Mutant(
        "a watch that ends is opened again without pause",
        f"{_OPERATOR}/kube/cache.py",
        "            if failures == 1:\n                continue\n",
        "            continue\n",
        ("tests/unit/kube/test_cache.py",),
    ),
    Mutant(
        "an agent that takes a prefix for its token",
        "runtime/dsv4_runtime/agent/http.py",
        'if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):',
        'if not (given and f"Bearer {token}".startswith(given)):',
        ("tests/unit/agent/test_http.py",),
    ),
    Mutant(
        "vLLM's port takes a prefix for its token",
        "runtime/dsv4_runtime/engine/token_auth.py",
        "hmac.compare_digest(value, self._token)",
        "self._token.startswith(value)",
        ("tests/unit/engine/test_token_auth.py",),
    ),
    Mutant(
        "one token for all incarnations",
        "runtime/dsv4_runtime/contract/token.py",
        "token_of(key, secrets.token_hex(_SALT_CHARS // 2))",
        'token_of(key, "0" * _SALT_CHARS)',
        ("tests/unit/contract/test_token.py",),
    ),
    Mutant(
        "a time that jumps with the machine's clock",
        "runtime/dsv4_runtime/contract/clock.py",
        "self._unix += min(reach, max(-reach, self._wall() - self._unix))",
        "self._unix = self._wall()",
        ("tests/unit/contract/test_clock.py",),
    ),
    Mutant(
        "shards that an index has elsewhere",
        "runtime/dsv4_runtime/weights/checkpoint.py",
        "relative(str(file))",
        "str(file)",
        ("tests/unit/weights/test_origins.py", "-k", "index"),
    ),
)
