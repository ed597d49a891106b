"""What the browser knows: a link and a cookie for each labeller, and tokens of questions.

All of them are HMACs, made from the folder's key; see key.py.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable, Sequence

from lm_human_preferences.labels.page.key import FolderKey


class Access:
    """The labellers' links and cookies, and to whom each belongs."""

    def __init__(self, key: FolderKey, labellers: Sequence[str]) -> None:
        self._key, self.labellers = key, labellers
        # Browsers send cookies of one host to all its ports, where other folders may be.
        self.cookie_name = f'labelling-{self._code("cookie name")[:8]}'
        self._tokens = {name: self._code(f'link of {name}') for name in labellers}
        self._cookies = {name: self._code(f'cookie of {name}') for name in labellers}
        self._proofs = {name: self._code(f'proof of {name}') for name in labellers}

    def _code(self, text: str) -> str:
        return base64.urlsafe_b64encode(self._key.derive(text)).decode().rstrip('=')

    @property
    def folder(self) -> str:
        """A name of the folder for the browser, which reveals nothing about its path."""
        return self.cookie_name

    def token(self, labeller: str) -> str:
        """The secret in a labeller's link."""
        return self._tokens[labeller]

    def cookie(self, labeller: str) -> str:
        """The cookie that a labeller gets for it."""
        return self._cookies[labeller]

    def proof(self, labeller: str) -> str:
        """What the page of this port keeps, and sends with the cookie, which all ports get."""
        return self._proofs[labeller]

    def by_token(self, token: str) -> str | None:
        """The labeller who has this link."""
        return _owner(self._tokens, token)

    def by_cookie(self, cookie: str, proof: str) -> str | None:
        """The labeller who has this cookie and this proof."""
        labeller = _owner(self._cookies, cookie)
        return labeller if labeller == _owner(self._proofs, proof) else None


def _owner(codes: dict[str, str], given: str) -> str | None:
    """The name whose code was given; how long this takes reveals nothing about the codes."""
    found = None
    for name, code in codes.items():
        if hmac.compare_digest(code.encode(), given.encode(errors='replace')):
            found = name
    return found


class QuestionTokens:
    """What the browser calls the questions: texts of 64 digits that tell nothing.

    The id of a question is a hash of its samples in the order in which the folder has them, which
    could be found by trying all orders of the samples that are shown.
    """

    def __init__(self, key: FolderKey) -> None:
        self._key = key.derive(FolderKey.TOKENS)
        self._tokens: dict[str, str] = {}
        self._ids: dict[str, str] = {}

    def token(self, question: str) -> str:
        """The token of a question's id."""
        if question not in self._tokens:
            token = hmac.digest(self._key, question.encode(), 'sha256').hex()
            self._tokens[question] = token
            self._ids[token] = question
        return self._tokens[question]

    def id(self, token: str, questions: Iterable[str]) -> str | None:
        """The id of the one of `questions` that has a token; None where none of them has it."""
        if token not in self._ids:  # a page may know it from the server before
            for question in questions:
                self.token(question)
        return self._ids.get(token)
