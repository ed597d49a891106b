"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """A mistake of the user: str(e) is one line that names the option or the file and the fix.

    The command line prints `error: ...` to standard error and exits with status 2.
    """


class OptionError(UserError):
    """A mistake in the value of one option: str(e) is its name and the text.

    A caller that got the value in another way than by this option takes the text alone.
    """

    def __init__(self, option: str, text: str) -> None:
        super().__init__(f'{option} {text}')
        self.text = text
