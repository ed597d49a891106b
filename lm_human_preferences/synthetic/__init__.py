"""Made-up film reviews: a language model that has learned them, and their exactly known reward."""
