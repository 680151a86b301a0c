"""Verification of an OpenAI-compatible endpoint: checks as data, their requests, and comparison with a reference."""
