"""Is the engine alive? Samplers look at it from all sides, pure rules judge what they saw."""
