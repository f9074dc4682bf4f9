"""Choice of the next task: order, mixture and curriculum."""
