"""Run from its folder on this machine: state, conditions and failures of attempts."""
