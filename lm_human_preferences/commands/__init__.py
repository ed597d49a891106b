"""Commands that do not train. `evaluate` and `figures` are in evaluation/ and reproduction/."""
