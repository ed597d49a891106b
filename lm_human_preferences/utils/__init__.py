"""What everything else stands on: options, settings, tensor functions, the console.

Knows nothing of models, labels or runs.
"""
