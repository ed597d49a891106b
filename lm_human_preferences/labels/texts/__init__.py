"""Labels as texts, in the formats of other tools: read, turned into token ids, and written."""
