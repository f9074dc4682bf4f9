"""Journal of finished rollouts: format, writer, ledger of trained groups, and recovery after a restart."""
