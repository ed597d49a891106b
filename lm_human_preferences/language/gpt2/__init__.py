"""GPT-2: its sizes, and its names in TensorFlow checkpoints."""
