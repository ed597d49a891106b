"""Commands that do not train. `evaluate` is in evaluation/, `report` in report/."""
