"""Fine-tuning GPT-2 from human preferences: a PyTorch port of OpenAI's release of 2019."""

__version__ = '1.0.0'
