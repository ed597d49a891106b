"""Language models: encodings, networks, released and saved models, and sampling; no rewards."""
