"""Faults between an operator and a real API server, and a checker of the invariants."""
