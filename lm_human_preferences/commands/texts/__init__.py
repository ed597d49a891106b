"""Commands that read files of texts: labels made with other tools, and texts to score."""
