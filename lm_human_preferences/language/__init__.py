"""Language model: encodings, networks, released and saved models, sampling; no rewards."""
