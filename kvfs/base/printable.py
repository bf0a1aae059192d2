"""Names for people: anybody may give a file or a tensor a name that a terminal takes for orders, or
that ends a line."""


def printable(text: str) -> str:
    """The text, with escapes in place of control characters and of bytes that are no text."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
