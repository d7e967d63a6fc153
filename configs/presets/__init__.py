"""Presets as YAML data: the demo model, the tiny test models, published model sizes."""
