"""The network between members: found in sysfs, checked, handed to NCCL, and proved before a model is loaded."""
