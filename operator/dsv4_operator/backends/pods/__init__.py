"""Backends with members as pods: pods that the operator owns directly, or pods of a RayCluster that it owns."""

from dsv4_operator.backends.pods.backend import KubeRayBackend, PodsBackend
from dsv4_operator.backends.pods.cluster import Cluster

__all__ = ["Cluster", "KubeRayBackend", "PodsBackend"]
