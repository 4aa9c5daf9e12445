"""The demo's prompts: a long text that many requests share, and questions behind it. Does not know tokens."""

COLOURS = ("red", "green", "blue", "white", "amber", "silver", "golden", "violet", "grey", "ivory")
ROOMS = 44
"""Makes the shared text about 1,000 tokens of SmolLM2."""
QUESTION = "What is the capital of France?"
EARLIER_QUESTION = "Is there a room for forty people?"
"""What somebody else asked before, so that the shared text's KV is in the pool."""


def conversation(question: str) -> list[dict[str, str]]:
    """A chat: the shared text as the system's message, then the question."""
    text = "\n".join(["You help the guests of a large library. This is its list of rooms.", *map(_room, range(ROOMS))])
    return [{"role": "system", "content": text}, {"role": "user", "content": question}]


def _room(number: int) -> str:
    where = f"The {COLOURS[number % 10]} room on floor {number // 10 + 1}"
    return f"{where} seats {6 + 7 * number % 40} people and opens at {7 + number % 5} o'clock."
