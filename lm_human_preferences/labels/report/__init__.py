"""Report on a folder of labels: counts, disagreements, and intervals of all figures."""
