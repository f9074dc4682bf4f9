"""Steps of a run computed again from what its volume has, for `rlrun replay`; nothing is written but the answer."""
