"""The network between members: discovery in sysfs, checks, NCCL configuration, and verification before the model is
loaded.
"""
