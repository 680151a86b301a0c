"""The Pods backend: the members of a group are pods that the operator owns directly."""

from dsv4_operator.backends.pods.backend import PodsBackend
from dsv4_operator.backends.pods.cluster import Cluster

__all__ = ["Cluster", "PodsBackend"]
