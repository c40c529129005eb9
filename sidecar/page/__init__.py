"""The status page: files only, no code."""
