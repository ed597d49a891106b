"""Reading and writing labels as texts in other tools' formats, and converting them to token ids."""
