"""Report on a folder of labels: agreement of people, and intervals of all figures."""
