"""Kubernetes objects from a deployment and its plans: pure functions that return plain dicts."""
