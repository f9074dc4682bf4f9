"""What an accumulated gradient becomes: norm, clip and update (`update`), the optimizers of our own (`muon`), and times of parts."""
