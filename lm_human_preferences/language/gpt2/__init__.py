"""What concerns GPT-2 alone: its parameters, what of it was released, and TensorFlow's names."""
