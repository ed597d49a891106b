"""Adapters (LoRA): low-rank updates of linear layers whose weights stay frozen; PEFT's files."""
