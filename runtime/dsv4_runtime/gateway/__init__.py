"""The HTTP front of a group: passes requests through, and keeps them while the engine is away (docs/gateway.md)."""
