"""The one kind of error that is the user's to mend."""

import contextlib
from collections.abc import Iterator


class UserError(ValueError):
    """A mistake of the user: str(e) is one line that names the option or the file and the fix.

    The command line prints `error: ...` to standard error and exits with status 2.
    """


class OptionError(UserError):
    """A mistake in the value of one option or argument: str(e) is its name and the text.

    A caller that got the value in another way gives it another name: see about_option and
    option_renamed.
    """

    def __init__(self, option: str, text: str) -> None:
        super().__init__(f'{option} {text}')
        self.option = option
        self.text = text


@contextlib.contextmanager
def about_option(option: str) -> Iterator[None]:
    """Within the block, what is wrong is the value of `option`: a UserError is an OptionError.

    Whoever knows where a value is from says so; what looks at the value need not.
    """
    try:
        yield
    except UserError as e:
        text = e.text if isinstance(e, OptionError) else str(e)
        raise OptionError(option, text) from e


@contextlib.contextmanager
def option_renamed(option: str) -> Iterator[None]:
    """Within the block, an OptionError is about `option`; other errors stay what they are."""
    try:
        yield
    except OptionError as e:
        raise OptionError(option, e.text) from e
