"""The checkpoint's bytes: fetching, verifying, sharing between members, and the page cache."""
