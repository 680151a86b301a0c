"""The agent's decisions: pure functions over typed events. No clock, no files, no network, no asyncio."""
