"""Interned strings of a trace: each text is stored once and named by its position."""


class StringTable:
    """Texts in the order in which they were first asked for; position 0 is the empty text."""

    def __init__(self) -> None:
        self.texts: list[str] = [""]
        self._number: dict[str, int] = {"": 0}

    def number(self, text: str) -> int:
        """Position of `text`, which is added when it is new."""
        number = self._number.get(text)
        if number is None:
            number = self._number[text] = len(self.texts)
            self.texts.append(text)
        return number
