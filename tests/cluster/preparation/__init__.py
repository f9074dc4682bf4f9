"""The slow part of a cold start: commands that run for minutes with progress lines, Go builds, and several jobs at once."""
