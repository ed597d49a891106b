"""Base of all networks: attention, heads, files of weights, and GPT-2's sizes and tensor names."""
