"""Command line: options from the classes of hparams/, and the start of a job, without torch."""
