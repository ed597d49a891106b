"""Fine-tuning language models from human preferences: a PyTorch port of OpenAI's release of 2019."""

__version__ = '1.0.0'
