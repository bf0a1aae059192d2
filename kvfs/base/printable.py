"""Names for people: a file or a tensor may have a name that a terminal takes for commands, or that
ends a line."""


def printable(text: str) -> str:
    """Returns the text, with escapes in place of control characters and of undecodable bytes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
