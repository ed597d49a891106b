"""Report on a folder of labels: counts, disagreements, and 95 % confidence intervals."""
