"""Where a reward comes from: known, function, classifier, head on hidden states, saved, new."""
