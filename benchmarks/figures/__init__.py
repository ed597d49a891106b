"""Paper's Figures 2 and 3 in miniature, from many short runs of mock_sentiment."""
