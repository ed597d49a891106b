"""Export to transformers: reward models as sequence classifiers, their tokenisers, and checks."""
