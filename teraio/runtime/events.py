"""Notable events of a session: fallbacks, warnings, advice, each said once with a count."""

import logging
from collections import Counter

logger = logging.getLogger("teraio")


class EventLog:
    """What happened, in words, in order of first appearance."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, text: str, *, level: int = logging.INFO) -> None:
        """Note `text`; it is logged the first time only."""
        self._counts[text] += 1
        if self._counts[text] == 1:
            logger.log(level, text)

    def texts(self) -> list[str]:
        """The events, those that happened more than once with their count."""
        return [text if count == 1 else f"{text} ({count} times)" for text, count in self._counts.items()]
