"""Environment variables that an image knows."""

from __future__ import annotations

from dsv4_operator.planning.images.arguments import unknown
from dsv4_operator.planning.images.profiles import ImageProfile, profiles
from dsv4_operator.planning.images.surface import library


def variable_problem(name: str, value: str, profile: ImageProfile) -> str | None:
    """Return what is wrong with the environment variable `name` in the image; None if nothing is known to be.

    Only names with a prefix of a library that the profile lists are checked: others may be read by anything.
    """
    if name in profile.extra_env:
        return None
    if name.startswith("VLLM_"):
        accepts = profile.surface.env.get(name)
        if accepts is None:
            if other := next((one.name for one in profiles() if name in one.extra_env), None):
                of = f"vLLM {profile.surface.vllm}" + _in_image(profile)
                return f'"{name}" is unknown to {of}; remove it, or set spec.engine.profile to {other}, which reads it'
            known = [*profile.surface.env, *profile.extra_env]
            return unknown(name, known, f"vLLM {profile.surface.vllm}" + _in_image(profile))
        problem = accepts.problem(value)
        return f"{name}: {problem}" if problem else None
    for listed in profile.libraries:
        prefix, names = library(listed)
        if name.startswith(prefix) and name not in names:
            return unknown(name, sorted(names), listed.replace("-", " ", 1))
    return None


def _in_image(profile: ImageProfile) -> str:
    return f" and the image profile {profile.name}" if profile.extra_env else ""
