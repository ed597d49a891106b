"""Adapters (LoRA), low-rank updates of linear layers with frozen weights, and their PEFT files."""
