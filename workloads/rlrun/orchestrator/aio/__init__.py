"""Building blocks of the asyncio process: conditions, file operations in threads, and writers that nothing waits for."""
