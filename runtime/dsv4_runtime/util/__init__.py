"""Utilities of the operator and the runtime that depend on the standard library alone."""
