"""Checkpoint files: fetching, verification, sharing between members, and the page cache."""
