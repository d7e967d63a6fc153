"""What can be chosen: frozen configurations that reject strangers, and YAML presets."""
