"""Advantages, losses and presets by name: their options, defaults and bounds."""
