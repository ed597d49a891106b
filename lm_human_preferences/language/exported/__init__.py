"""Export reward models as transformers' classifiers, write their tokenisers, and check exports."""
