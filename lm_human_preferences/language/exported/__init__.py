"""Export reward models, with tokenisers, as classifiers for transformers, and check exports."""
