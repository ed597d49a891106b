"""The base of all networks: attention, heads, weights in files; GPT-2's sizes and tensor names."""
