"""Estimates of GPU memory: what a run's trainer and engines keep on each GPU, and changes that make a run fit.

Pure: takes a specification, a model's shape and a memory size, and returns a report. It loads nothing and needs neither torch nor a GPU.
"""
