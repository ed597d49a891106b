"""GPT-2: its sizes, its releases, and its names in TensorFlow checkpoints."""
