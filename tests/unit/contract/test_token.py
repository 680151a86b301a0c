"""Tokens of incarnations, and their derivation by clients with the deployment's key."""

from __future__ import annotations

import pytest

from dsv4_runtime.contract.token import CHALLENGE, AgentCredential, challenge, new_key, new_token

KEY = new_key()


def test_every_incarnation_has_another_token() -> None:
    made = {new_token(KEY) for _ in range(100)}
    assert len(made) == 100
    assert {len(token) for token in made} == {96}


def test_a_refusal_identifies_the_token_only_to_holders_of_the_key() -> None:
    token = new_token(KEY)
    refusal = {CHALLENGE: challenge(token)}
    assert token[32:] not in refusal[CHALLENGE]
    knows, guesses = AgentCredential(), AgentCredential()
    assert knows.answer(KEY, {}, refusal)
    assert knows.token == token
    assert knows.headers == {"Authorization": f"Bearer {token}"}
    assert guesses.answer(new_key(), {}, refusal)
    assert guesses.token != token


def test_a_repeated_refusal_is_not_retried() -> None:
    credential, refusal = AgentCredential(), {CHALLENGE: challenge(new_token(KEY))}
    assert credential.answer(KEY, {}, refusal)
    assert not credential.answer(KEY, credential.headers, refusal)


def test_a_request_open_during_another_ones_refusal_is_repeated_too() -> None:
    credential, refusal = AgentCredential(), {CHALLENGE: challenge(new_token(KEY))}
    first, second = credential.headers, credential.headers
    assert credential.answer(KEY, first, refusal)
    assert credential.answer(KEY, second, refusal)


@pytest.mark.parametrize(
    "said", ["", "Bearer", 'Bearer realm="dsv4", salt="12"', f'Bearer realm="dsv4", salt="{"z" * 32}"', "x" * 10_000]
)
def test_a_challenge_without_a_valid_salt_is_ignored(said: str) -> None:
    credential = AgentCredential()
    assert not credential.answer(KEY, {}, {CHALLENGE: said})
    assert credential.headers == {}
