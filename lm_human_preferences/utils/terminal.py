"""Text that others wrote, made safe to print."""

from __future__ import annotations

# First and last of the characters that show nothing: Default_Ignorable_Code_Point of Unicode 17.0,
# https://www.unicode.org/Public/17.0.0/ucd/DerivedCoreProperties.txt. Python's isprintable takes
# some of them for letters and accents.
IGNORABLE = (
    (0x00AD, 0x00AD),
    (0x034F, 0x034F),
    (0x061C, 0x061C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFF8),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
)


def printable(text: str) -> str:
    """`text` with escapes, such as \\x1b, for characters that must not be printed or show nothing.

    These move the cursor, change colours or the direction of writing, or end the line; or they are
    invisible.
    """
    if text.isascii() and text.isprintable():  # most of it, and much faster
        return text
    return ''.join(
        character if _is_shown(character) else character.encode('unicode_escape').decode()
        for character in text
    )


def _is_shown(character: str) -> bool:
    code = ord(character)
    is_ignorable = any(first <= code <= last for first, last in IGNORABLE)
    return character.isprintable() and not is_ignorable
