"""Named advantages, losses and presets with their options, defaults and bounds."""
