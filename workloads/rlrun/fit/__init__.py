"""Arithmetic of GPU memory: what a run's trainer and engines keep on each GPU, and changes that make a run fit.

Pure: a specification, a model's shape and a size of memory in, a report out. Nothing is loaded, and neither torch nor a GPU is needed.
"""
