"""The journal of finished rollouts: format, writer, ledger of what is trained, and recovery after a restart."""
