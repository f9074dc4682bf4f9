"""Group of the trainer's processes: launch, layout, collectives of small values, and a common stop."""
