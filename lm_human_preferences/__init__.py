"""Fine-tuning language models from human preferences: OpenAI's release of 2019 in PyTorch."""

__version__ = '1.0.0'
