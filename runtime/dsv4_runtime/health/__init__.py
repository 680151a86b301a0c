"""Health of the engine: samplers on every member, and pure rules that judge the samples."""
