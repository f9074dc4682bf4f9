"""Building blocks of the asyncio process: conditions, file operations in threads, and best-effort writers."""
