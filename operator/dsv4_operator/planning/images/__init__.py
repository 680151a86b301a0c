"""Capabilities of the images: their engine's version, executors, formats, flags and variables, as data files.

`profiles.toml` has one entry an image, each with its sources and their dates. `surface/` has what the parsers and
tables of each vLLM, Ray, NCCL and Triton accept, written by `benchmarks/image_surface.py`.
"""

from __future__ import annotations

from dsv4_operator.planning.images.arguments import Argument, argument_problems, read_arguments
from dsv4_operator.planning.images.profiles import (
    Device,
    ImageProfile,
    ProfileSource,
    profile_for,
    profile_named,
    profiles,
)
from dsv4_operator.planning.images.surface import Surface
from dsv4_operator.planning.images.variables import variable_problem

__all__ = [
    "Argument",
    "Device",
    "ImageProfile",
    "ProfileSource",
    "Surface",
    "argument_problems",
    "profile_for",
    "profile_named",
    "profiles",
    "read_arguments",
    "variable_problem",
]
