"""Where a thread that issues finds its work: it sleeps without the interpreter lock, and runs a program without it.

A thread that Python wakes needs the interpreter first, which whoever woke it may keep for five milliseconds. So the
next program is laid out as numbers, and a bell wakes the loop that runs it. Does not know waves, lanes or flights.
"""

import queue
from collections.abc import Callable

import numpy as np

from layercast.move.cuda_bell import Bell
from layercast.move.cuda_driver import Call
from layercast.move.cuda_issue import DESK_WORDS, LAID, PUT, STIRRED, Issue
from layercast.move.cuda_program import Ints
from layercast.move.line import Item


class Desk:
    """The queue of a line; an item may have its program laid out before it is put. `lay` and `put` belong together.

    bind: what the thread that gets must do first, once.
    """

    def __init__(self, issue: Issue, ring: Call, bind: Callable[[], None]) -> None:
        self._issue, self._bell = issue, Bell(ring, sleeping=True)
        self._bind: Callable[[], None] | None = bind
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._words = np.zeros(DESK_WORDS, np.int64)
        self._words[0], self._words[LAID] = self._bell.file, -1
        self._kept: tuple[Ints, ...] = ()
        self._got = 0

    def lay(self, table: Ints, cuts: Ints, errors: Ints, first: int) -> bool:
        """Have a program run (see `Issue.run`) before the item is got that is put next.

        False: one that was laid out before still lies there. What its rows point to must live until then.
        """
        if self._words[LAID] >= self._got:
            return False
        self._kept = (table, cuts, errors)
        self._issue.lay(self._words, table, cuts, errors, first)
        return True

    def stir(self) -> None:
        """Wake the thread for an item that is about to be put, so that it is awake by then. May be for nothing."""
        self._words[STIRRED] = self._words[PUT] + 1
        self._bell.ring()

    def put(self, item: Item, /) -> None:
        """Add an item, and wake the thread."""
        self._items.put(item)
        self._words[PUT] += 1
        self._bell.ring()

    def get(self) -> Item:
        """The next item, once its program has run. For one thread."""
        if self._bind is not None:
            self._bind()
            self._bind = None
        self._issue.attend(self._words, self._got)
        self._got += 1
        return self._items.get_nowait()

    def get_nowait(self) -> Item:
        """The next item, which nobody gets any more. Raises queue.Empty."""
        return self._items.get_nowait()

    def close(self) -> None:
        """Give the bell back; nobody puts or gets any more."""
        self._bell.close()
