"""Which task is sampled next: order, mixture and curriculum."""
