"""From an accumulated gradient to an update: norm, clip and update (`update`), the optimizers of our own (`muon`), and times of parts."""
