"""What everything else stands on: options, settings, tensor functions, the console.

Knows nothing of models, labels or runs, but for `launch`, the front door of all commands, which has
the place that the original gave it.
"""
