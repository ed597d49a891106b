"""Commands that read files of texts: labels of other tools, and texts to score."""
