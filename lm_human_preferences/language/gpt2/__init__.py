"""What concerns GPT-2 alone: its parameters, released sizes, and TensorFlow's names for them."""
