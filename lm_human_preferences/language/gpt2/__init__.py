"""GPT-2: its parameters, its releases, and TensorFlow's names."""
