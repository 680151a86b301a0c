"""The Pods backend: the members of a group are pods that the operator owns directly."""

from dsv4_operator.backends.pods.backend import FenceError, PodsBackend
from dsv4_operator.backends.pods.cluster import Cluster, PodView

__all__ = ["Cluster", "FenceError", "PodView", "PodsBackend"]
