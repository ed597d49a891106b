"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """A mistake of the user: str(e) is one line that names the option or the file and the fix.

    The command line prints `error: ...` to standard error and exits with status 2.
    """
